# SPDX-License-Identifier: Apache-2.0
"""``python -m rankwise.auto`` under launchers of one machine: the script runs once, and as in plain Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests import plain_script

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

AUTO = (sys.executable, "-m", "rankwise.auto", plain_script.__file__)
LAUNCHERS = {
    "mpirun": ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", *AUTO),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *AUTO[1:]),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("launcher", "exit_code"), [("mpirun", 3), ("torchrun", 0)])
def test_the_script_runs_once_and_as_in_plain_python(command: Command, launcher: str, exit_code: int) -> None:
    ran = subprocess.run(
        [*LAUNCHERS[launcher], str(command.folder), str(exit_code)],
        env=command.environment(RANKWISE_AUTO_SPLIT="always", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == exit_code, ran.stderr
    assert "runs whole" not in ran.stderr
    plain_script.check(command.folder, ran.stdout)


TRAINS = """
import os, sys, torch
from torch import nn
model = nn.Linear(3, 2)
for step in range(10**6):
    model(torch.randn(8, 3)).sum().backward()
    if step == 5:
        print(os.getpid(), flush=True)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("killed", ["rank zero", "a server"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_ends_the_job(command: Command, launcher: str, killed: str) -> None:
    train = command.write("train.py", TRAINS)
    with subprocess.Popen(
        [*LAUNCHERS[launcher][:-1], str(train)],
        cwd=command.folder,
        env=command.environment(RANKWISE_AUTO_SPLIT="always", OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        rank_zero = int(job.stdout.readline())
        os.kill(rank_zero if killed == "rank zero" else command.siblings(rank_zero)[0], signal.SIGKILL)
        _, said = job.communicate(timeout=120)
    assert job.returncode, said
    assert command.wait_until_gone(command.processes(), 30) == [], said
