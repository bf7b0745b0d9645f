# SPDX-License-Identifier: Apache-2.0
"""What each rank runs while the link between its hosts is cut: trains in one way after another.

Arguments: a folder all ranks share, the limit of every wait in seconds, and the jobs. A job is the name of a way of
training; with ``-cut`` behind it, every rank that steps waits before its fourth step for the file ``<job>.go``. Into
the folder go ``<job>-<rank>.ready`` by who waits there, ``<job>-<rank>.<step>`` for each step taken, and
``<job>-<rank>.through`` when the loop is over. Each rank prints where each job led.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import rankwise as rw

START_SECONDS = 40.0
WIDTH = 200
NUM_STEPS = 12
STEPS_BEFORE = 3
"""Steps of every rank before the cut."""
SERVER = 1
MAX_STALENESS = 2
EVERY, OVERLAP = 4, 3
SERVED = {
    "sync": {"mode": "sync"},
    "async": {"mode": "async"},
    "stale": {"mode": "async", "max_staleness": MAX_STALENESS},
}
"""Ways with a parameter server, and what it is told."""


class Loop:
    """One rank's steps of one job, and what it says of them in files."""

    def __init__(self, folder: Path, job: str, rank: int) -> None:
        self._folder = folder
        self._job = job
        self._rank = rank

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take all steps."""
        generator = torch.Generator().manual_seed(self._rank)
        for step in range(1, NUM_STEPS + 1):
            if step == STEPS_BEFORE + 1 and self._job.endswith("-cut"):
                self._wait()
            x = torch.randn(4 + self._rank, WIDTH, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
            self._say(str(step))

    def end(self) -> None:
        """Say that the loop is over."""
        self._say("through")

    def _wait(self) -> None:
        self._say("ready")
        while not (self._folder / f"{self._job}.go").exists():
            time.sleep(0.01)

    def _say(self, what: str) -> None:
        (self._folder / f"{self._job}-{self._rank}.{what}").touch()


def _train(way: str, loop: Loop) -> dict[str, str | int]:
    """Train in one way, and say where that led."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    num_updates = 0
    if way in SERVED:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        server = rw.parameter_server(model, optimizer, servers=[SERVER], **SERVED[way])  # type: ignore[arg-type]
        if server.is_server:
            server.serve()
        else:
            loop.run(model, optimizer)
            server.finish()
            loop.end()
        server.synchronize()
        num_updates = server.num_updates if server.is_server else 0
    elif way == "diloco":
        outer = rw.local_sgd(model, every=EVERY, overlap=OVERLAP, outer="diloco")
        loop.run(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        outer.synchronize()
    else:
        model = rw.replicate(model, compress=way)
        loop.run(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5))
    digest = hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in model.parameters())).hexdigest()
    return {"digest": digest, "num_updates": num_updates}


def main(folder: Path, timeout_seconds: float, jobs: list[str]) -> None:
    """Train in every way that was asked for, each in a world of its own."""
    torch.set_num_threads(1)
    port = int(os.environ["MASTER_PORT"])
    with rw.join(timeout_seconds=START_SECONDS):
        pass  # from here on all run, and a short limit is not that of a slow start
    for number, job in enumerate(jobs, 1):
        os.environ["MASTER_PORT"] = str(port + number)
        with rw.join(timeout_seconds=timeout_seconds) as world:
            found = _train(job.removesuffix("-cut"), Loop(folder, job, world.rank))
        print(json.dumps({"job": job, **found}), flush=True)  # noqa: T201 - the result


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
