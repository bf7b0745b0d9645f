# SPDX-License-Identifier: Apache-2.0
"""``python -m rankwise.tools.auto`` under launchers of one machine: the script runs once, and as in plain Python."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests import plain_script

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

AUTO = (sys.executable, "-m", "rankwise.tools.auto", plain_script.__file__)
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
