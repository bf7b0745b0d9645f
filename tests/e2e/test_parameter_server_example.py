# SPDX-License-Identifier: Apache-2.0
"""The example of a parameter server: what its workers learn, in step and not, with one of them killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "parameter_server.py"
LIMIT_SECONDS = 110
STEPS_PER_EPOCH = 15
"""1437 digits, 96 per step of the three workers together."""
KILLED_IN_STEP_20 = f"""
import os, signal, sys
from itertools import count

from torch.nn.modules.module import register_module_forward_pre_hook

import rankwise.session

sys.path.insert(0, {str(EXAMPLE.parent)!r})
import parameter_server

step = count(1)

def look(module, arguments):
    if isinstance(module, parameter_server.Net) and rankwise.session.current().world.rank == 1 and next(step) == 20:
        os.kill(os.getpid(), signal.SIGKILL)

register_module_forward_pre_hook(look)
parameter_server.main()
"""


def run(script: Path, *options: str) -> tuple[list[tuple[int, int]], float, str]:
    """Run a script on three workers and a server; return the workers' steps, the accuracy, and what was said."""
    command = [sys.executable, "-m", "rankwise", "run", "-n", "4", str(script), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"\[rank (\d)/4 .*\] (\d+) steps in", done.stdout)
    (accuracy,) = re.findall(r"\[rank 3/4 .*\] accuracy (\S+)", done.stdout)
    return sorted((int(rank), int(steps)) for rank, steps in found), float(accuracy), done.stderr


@pytest.mark.timeout(120)
def test_workers_that_step_together_learn_what_one_rank_learns() -> None:
    steps, accuracy, _ = run(EXAMPLE, "--mode", "sync", "--epochs", "6")
    assert steps == [(worker, 6 * STEPS_PER_EPOCH) for worker in range(3)]
    assert accuracy > 0.9


@pytest.mark.timeout(120)
def test_workers_learn_beside_a_slow_one_and_without_one_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED_IN_STEP_20, encoding="utf-8")
    steps, accuracy, said = run(
        script, "--mode", "async", "--epochs", "8", "--max-staleness", "4", "--slow-worker", "4"
    )
    assert steps == [(worker, 8 * STEPS_PER_EPOCH) for worker in (0, 2)]
    assert accuracy > 0.8
    assert re.search(r"rank 1 failed .*SIGKILL", said)
