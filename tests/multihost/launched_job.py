# SPDX-License-Identifier: Apache-2.0
"""One ``rankwise run`` per host, of one job, and what it left in its folder."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import elastic_training
import pytest
import torch

import rankwise

if TYPE_CHECKING:
    from collections.abc import Callable

    from hosts import Hosts

    from tests.warm import Started

SCRIPT = Path(elastic_training.__file__)
NUM_STEPS = elastic_training.EPOCHS * -(-elastic_training.NUM_SAMPLES // elastic_training.GLOBAL_BATCH_SIZE)


class Job:
    """One launcher per host, all in one folder."""

    def __init__(self, hosts: Hosts, folder: Path, what: str, *options: str, rendezvous: str | None = None) -> None:
        self.hosts = hosts
        self.folder = folder
        meeting = f"{rendezvous or hosts.addresses[0]}:29400"
        self.words = ["--rendezvous", meeting, *options, str(SCRIPT), str(folder), what]
        self.env: dict[int, dict[str, str]] = {}
        """More variables for the launcher of a host."""
        self.launchers: dict[int, Started] = {}

    def start(self, host: int) -> None:
        """Start the launcher of a host."""
        number = len(list(self.folder.glob(f"host{host}-*.err")))
        env = {
            "PYTHONPATH": str(Path(rankwise.__file__).parents[1]),
            "RANKWISE_SECRET": "of this test",
            "OMP_NUM_THREADS": "1",
            **self.env.get(host, {}),
        }
        words = [sys.executable, "-m", "rankwise", "run", "-n", "2", *self.words]
        with (self.folder / f"host{host}-{number}.err").open("w", encoding="utf-8") as file:
            self.launchers[host] = self.hosts.start(host, words, env, stdout=file, stderr=file)

    def exit_code(self, host: int, seconds: float = 30.0) -> int:
        """Return how a host's launcher ended."""
        try:
            return self.launchers[host].wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(self.said())

    def said(self) -> str:
        """Return what the launchers and ranks wrote."""
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.err")))

    def steps(self) -> list[list[float]]:
        """Return attempt, ranks, step and time of every step so far."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [[float(word) for word in line.split()] for line in lines]

    def wait_for(self, name: str, seconds: float = 40.0) -> None:
        """Return when a file is there."""
        self.wait_until((self.folder / name).exists, seconds)

    def wait_until(self, is_so: Callable[[], bool], seconds: float = 40.0) -> None:
        """Return when ``is_so()`` is true."""
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def check(self, expected: dict[str, torch.Tensor], worlds: list[tuple[int, int]]) -> None:
        """Hold the steps and the final parameters to the undisturbed run's."""
        steps = self.steps()
        assert [int(step) for _, _, step, _ in steps] == list(range(1, NUM_STEPS + 1)), self.said()
        assert sorted({(int(attempt), int(size)) for attempt, size, _, _ in steps}) == worlds, self.said()
        final = torch.load(self.folder / "final.pt", weights_only=True)
        for name, value in expected.items():
            torch.testing.assert_close(final[name], value, rtol=1e-12, atol=1e-12)
