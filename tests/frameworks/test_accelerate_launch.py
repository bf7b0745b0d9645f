# SPDX-License-Identifier: Apache-2.0
"""A script of rankwise under both of the ways in which ``accelerate launch`` starts several ranks on CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from conftest import HERE

if TYPE_CHECKING:
    from conftest import Launcher

LAUNCHED = str(HERE.parent / "e2e" / "launched.py")
LAUNCH = ("-m", "accelerate.commands.launch", "--num_processes=2", "--num_machines=1", "--mixed_precision=no")
TOLERANCE = 1e-10
pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("source", ["torchrun", "openmpi"])
def test_two_ranks_compute_what_one_rank_computes(
    launcher: Launcher, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, together = launcher.folder / "alone", launcher.folder / "together"
    alone.mkdir()
    together.mkdir()
    hosts = launcher.folder / "hosts"
    hosts.write_text("localhost slots=2\n")
    # Several ranks without GPUs are mpirun's, in Accelerate; mpirun wants to be asked to run as root.
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    way = {"torchrun": ["--multi_gpu"], "openmpi": ["--cpu", f"--mpirun_hostfile={hosts}"]}[source]
    for words in ([LAUNCHED, str(alone)], [*LAUNCH, *way, LAUNCHED, str(together)]):
        done = launcher.run(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    expected = torch.load(alone / "0.pt")["state"]
    for rank in range(2):
        got = torch.load(together / f"{rank}.pt")
        assert (got["local_rank"], got["world_size"], got["source"]) == (rank, 2, source)
        for name, value in expected.items():
            torch.testing.assert_close(got["state"][name], value, rtol=TOLERANCE, atol=TOLERANCE)
