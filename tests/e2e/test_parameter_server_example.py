# SPDX-License-Identifier: Apache-2.0
"""The example of a parameter server: what its workers learn, in step and not, beside a slow one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

EXAMPLE = Path(__file__).parents[2] / "examples" / "parameter_server.py"
LIMIT_SECONDS = 110
STEPS_PER_EPOCH = 15
"""1437 digits, 96 per step of the three workers together."""


def run(command: Command, *options: str) -> tuple[list[tuple[int, int]], float]:
    """Run the example on three workers and a server; return the workers' steps and the accuracy."""
    done = command.rankwise("run", "-n", "4", str(EXAMPLE), *options, seconds=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"\[rank (\d)/4 .*\] (\d+) steps in", done.stdout)
    (accuracy,) = re.findall(r"\[rank 3/4 .*\] accuracy (\S+)", done.stdout)
    return sorted((int(rank), int(steps)) for rank, steps in found), float(accuracy)


@pytest.mark.timeout(120)
def test_workers_that_step_together_learn_what_one_rank_learns(command: Command) -> None:
    steps, accuracy = run(command, "--mode", "sync", "--epochs", "6")
    assert steps == [(worker, 6 * STEPS_PER_EPOCH) for worker in range(3)]
    assert accuracy > 0.9


@pytest.mark.timeout(120)
def test_workers_learn_beside_a_slow_one(command: Command) -> None:
    steps, accuracy = run(command, "--mode", "async", "--epochs", "8", "--max-staleness", "4", "--slow-worker", "4")
    assert steps == [(worker, 8 * STEPS_PER_EPOCH) for worker in range(3)]
    assert accuracy > 0.8
