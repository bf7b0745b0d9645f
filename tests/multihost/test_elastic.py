# SPDX-License-Identifier: Apache-2.0
"""Jobs on two hosts of two ranks that are hurt in the middle, and end with the parameters of the undisturbed run."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import elastic_training
import pytest
import torch
from hosts import Hosts

import rankwise
import rankwise as rw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCRIPT = Path(elastic_training.__file__)
NUM_STEPS = elastic_training.EPOCHS * -(-elastic_training.NUM_SAMPLES // elastic_training.GLOBAL_BATCH_SIZE)
CUT_SECONDS = 3.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    with rw.join() as world:
        return elastic_training.train(world, tmp_path_factory.mktemp("undisturbed"), "nothing")


class Job:
    """One launcher per host, all in one folder."""

    def __init__(self, hosts: Hosts, folder: Path, what: str, *options: str) -> None:
        self.hosts = hosts
        self.folder = folder
        self.words = ["--rendezvous", f"{hosts.addresses[0]}:29400", *options, str(SCRIPT), str(folder), what]
        self.launchers: dict[int, subprocess.Popen[str]] = {}

    def start(self, host: int) -> None:
        """Start the launcher of a host."""
        number = len(list(self.folder.glob(f"host{host}-*.err")))
        env = {
            "PYTHONPATH": str(Path(rankwise.__file__).parents[1]),
            "RANKWISE_SECRET": "of this test",
            "OMP_NUM_THREADS": "1",
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


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_a_rank_that_dies_or_stops_is_replaced(
    hosts: Hosts, tmp_path: Path, undisturbed: dict[str, torch.Tensor], what: str
) -> None:
    job = Job(hosts, tmp_path, what, "--nodes", "2", "--max-restarts", "1")
    job.start(0)
    job.start(1)
    assert [job.exit_code(0), job.exit_code(1)] == [0, 0], job.said()
    job.check(undisturbed, [(0, 4), (1, 4)])


@pytest.mark.parametrize("way", ["launcher", "cable"])
def test_a_lost_node_is_gone_on_without_and_taken_in_again(
    hosts: Hosts, tmp_path: Path, undisturbed: dict[str, torch.Tensor], way: str
) -> None:
    job = Job(hosts, tmp_path, "wait", "--nodes", "1:2")
    job.start(0)
    job.start(1)
    job.wait_for("reached")
    if way == "cable":
        hosts.link(1, up=False)
    else:
        job.launchers[1].send_signal(signal.SIGKILL)
    try:
        job.wait_until(lambda: any(attempt == 1 for attempt, *_ in job.steps()))
    finally:
        hosts.link(1, up=True)
    if way != "cable":
        job.start(1)
    job.wait_until(lambda: "the ranks save at their next step" in job.said())
    (tmp_path / "go").touch()
    assert [job.exit_code(0), job.exit_code(1)] == [0, 0], job.said()
    job.check(undisturbed, [(0, 4), (1, 2), (2, 4)])


def test_a_cut_of_a_few_seconds_simply_resumes(
    hosts: Hosts, tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    job = Job(hosts, tmp_path, "wait", "--nodes", "2")
    job.start(0)
    job.start(1)
    job.wait_for("reached")
    hosts.link(1, up=False)
    try:
        (tmp_path / "go").touch()
        # No sign of life crosses the cable for that long.
        assert not select.select([], [], [], CUT_SECONDS)[0]
    finally:
        hosts.link(1, up=True)
    assert [job.exit_code(0), job.exit_code(1)] == [0, 0], job.said()
    job.check(undisturbed, [(0, 4)])
