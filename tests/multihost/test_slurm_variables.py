# SPDX-License-Identifier: Apache-2.0
"""A script that goes by Slurm's variables, on the ranks of rankwise's launcher in a job of a real Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from slurm import Slurm

TUTORIAL = str(Path(__file__).with_name("slurm_tutorial.py"))
RUN = (sys.executable, "-m", "rankwise", "run", "-n", "2", TUTORIAL)
SUBMIT = (sys.executable, "-m", "rankwise", "submit", "--nodes", "2", "--ranks-per-node", "2", TUTORIAL)
TWO_NODES = ("srun", "--nodes=2", "--ntasks-per-node=1")


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """What one device comes to: ranks have equally many samples, so that the mean of their gradients is that of all."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(12, 3)
    for _ in range(5):
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def noted(folder: Path) -> list[dict[str, Any]]:
    """Return what each rank saw, in the order of their numbers."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(list(folder.glob("*.json"))))]


def check(folder: Path, expected: dict[str, torch.Tensor], num_ranks: int, *, is_step: bool = True) -> None:
    """Hold weights and variables of a run on one node or two against what they have to be."""
    trained = torch.load(folder / "weights.pt")
    for name, tensor in expected.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-10, atol=1e-12)
    ranks = noted(folder)
    assert len(ranks) == num_ranks
    names = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS"]
    for rank, said in enumerate(ranks):
        variables = said["variables"]
        node_rank, local_rank = divmod(rank, 2)
        numbers = [str(number) for number in (rank, local_rank, node_rank, num_ranks, num_ranks)]
        assert [variables[name] for name in names] == numbers
        assert variables["RANKWISE_AGENT_SLURM_PROCID"] == str(node_rank)
        assert ("SLURM_STEP_NUM_TASKS" in variables) == is_step
        # As many as a srun in a task of such a step starts.
        assert said["nested"] == [f"{task} of {num_ranks}" for task in range(num_ranks)], said["errors"]
        assert "error" not in said["errors"]


@pytest.mark.parametrize("cpus", ["--cpus-per-task=1", "--cpus-per-task=2"])
def test_a_tutorials_script_trains_on_the_ranks_of_a_step(
    slurm: Slurm, tmp_path: Path, expected: dict[str, torch.Tensor], cpus: str
) -> None:
    ran = slurm.run("srun", "--ntasks=1", cpus, *RUN, str(tmp_path / "weights.pt"), str(tmp_path), cwd=tmp_path)
    assert ran.exit_code == 0, ran.stderr
    check(tmp_path, expected, 2)


@pytest.mark.timeout(120)
def test_a_tutorials_script_trains_on_the_ranks_of_two_nodes(
    slurm: Slurm, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    ran = slurm.run(*TWO_NODES, *RUN, str(tmp_path / "weights.pt"), str(tmp_path), cwd=tmp_path, timeout_seconds=90)
    assert ran.exit_code == 0, ran.stderr
    check(tmp_path, expected, 4)


@pytest.mark.timeout(120)
def test_a_submitted_job_and_a_launcher_outside_any_step_give_ranks_their_numbers(
    slurm: Slurm, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    for name in ("submitted", "batch"):
        (tmp_path / name).mkdir()
    words = (str(tmp_path / "submitted" / "weights.pt"), str(tmp_path / "submitted"))
    ran = slurm.run(*SUBMIT, *words, cwd=tmp_path, timeout_seconds=90)
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    check(tmp_path / "submitted", expected, 4)
    words = (str(tmp_path / "batch" / "weights.pt"), str(tmp_path / "batch"))
    text = " ".join((*RUN, *words))
    ran = slurm.run("sbatch", "--wait", "--ntasks=1", "--output=out", f"--wrap={text}", cwd=tmp_path)
    assert ran.exit_code == 0, (tmp_path / "out").read_text()
    check(tmp_path / "batch", expected, 2, is_step=False)
