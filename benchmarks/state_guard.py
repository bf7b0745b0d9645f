# SPDX-License-Identifier: Apache-2.0
"""Cost of comparing replicas: in steps of ``replicate``, and of DDP under ``--guard``.

The former take turns with and without within the same processes; the latter are processes that run one after the other.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from measure import Row, interleaved, median_ratio, seconds, show
from models import MODELS

import rankwise as rw
from rankwise.replicate.strategy_registry import strategy_of
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

NUM_RANKS = 2
NAMES = ("60 small layers", "transformer")
STEPS = {"60 small layers": 64, "transformer": 16}
"""Of one turn: a multiple of how many steps apart parameters are compared."""
REPETITIONS = {"60 small layers": 12, "transformer": 3}
RUNS = 3
REACH = 1.005


def train(model: torch.nn.Module, x: torch.Tensor, num_steps: int) -> Callable[[], float]:
    """Return what takes so many steps, and returns the seconds of one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def run() -> float:
        started = time.perf_counter()
        for _ in range(num_steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - started) / num_steps

    return run


def replicated(_: World, name: str) -> dict[str, list[float]]:
    """Return seconds per step with the guard and without."""
    torch.set_num_threads(1)
    model, shape = MODELS[name]()
    rw.replicate(model)
    loss = strategy_of(model).loss  # type: ignore[union-attr]
    guard, run = loss.guard, train(model, torch.randn(shape), STEPS[name])

    def side(kept: object) -> Callable[[], float]:
        def turn() -> float:
            loss.guard = kept
            rw.barrier()
            return run()

        return turn

    sides = {"with": side(guard), "without": side(None)}
    interleaved(sides, 3)
    return interleaved(sides, REPETITIONS[name])


def by_torch(name: str) -> None:
    """Train with DistributedDataParallel, as one rank of ``rankwise run``, and print the median of a step."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model, shape = MODELS[name]()
    run = train(torch.nn.parallel.DistributedDataParallel(model), torch.randn(shape), STEPS[name])
    run()
    found = [run() for _ in range(REPETITIONS[name])]
    # DDP that outlives its process group waits for gloo's threads with the interpreter's lock, which they may want.
    del run
    if torch.distributed.get_rank() == 0:
        print(statistics.median(found))
    torch.distributed.destroy_process_group()


def launched(name: str, *options: str) -> float:
    """Return what ``by_torch`` prints under the launcher."""
    command = [sys.executable, "-m", "rankwise", "run", "--device", "cpu", "-n", str(NUM_RANKS), *options]
    command += [str(Path(__file__)), "--rank", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def row(what: str, ours: list[float], peers: list[float]) -> Row:
    """Return a line of the table."""
    medians = [seconds(statistics.median(found)) for found in (ours, peers)]
    return Row(what, *medians, median_ratio(ours, peers), REACH)


def main() -> None:
    rows: list[Row] = []
    for name in NAMES:
        found = run_ranks(replicated, NUM_RANKS, name, timeout_seconds=900)[0].get()
        rows.append(row(f"step of replicate with its guard, {name}, against without", found["with"], found["without"]))
    for name in NAMES:
        sides = {"with": lambda n=name: launched(n, "--guard"), "without": lambda n=name: launched(n)}
        found = interleaved(sides, RUNS)
        rows.append(row(f"step of DDP with --guard, {name}, against without", found["with"], found["without"]))
    show(rows)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        by_torch(sys.argv[sys.argv.index("--rank") + 1])
    else:
        main()
