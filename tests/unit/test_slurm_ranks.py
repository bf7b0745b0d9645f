# SPDX-License-Identifier: Apache-2.0
"""Slurm's variables in a rank of the launcher: as srun would have set them, had it started the rank."""

from __future__ import annotations

from typing import Any

import pytest
from launcher_variables import golden

from rankwise.world.environments.rankwise import slurm_variables
from rankwise.world.environments.reading import format_counts, parse_counts

TWO_NODES: dict[str, Any] = {"rank": 3, "local_rank": 1, "node_rank": 1, "ranks_per_node": (2, 2)}


def test_a_rank_has_the_variables_of_a_task_of_srun() -> None:
    tasks = golden("slurm_two_nodes")
    for rank in range(4):
        node_rank, local_rank = divmod(rank, 2)
        # One launcher per node: what srun sets for it, in the words of a real one.
        agent: dict[str, str] = {
            **tasks[2 * node_rank]["variables"],
            "SLURM_PROCID": str(node_rank),
            "SLURM_NTASKS_PER_NODE": "1",
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), "2"),
            **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), "1(x2)"),
        }
        own = slurm_variables(agent, rank=rank, local_rank=local_rank, node_rank=node_rank, ranks_per_node=(2, 2))
        seen = {name: value for name, value in (agent | own).items() if not name.startswith("RANKWISE_")}
        assert seen == tasks[rank]["variables"]
        assert own["RANKWISE_AGENT_SLURM_PROCID"] == str(node_rank)
        assert own["RANKWISE_AGENT_SLURM_NTASKS"] == "2"


def test_a_batch_script_has_no_step_and_its_ranks_get_none() -> None:
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"}
    own = slurm_variables(batch, rank=1, local_rank=1, node_rank=0, ranks_per_node=(2,))
    assert own["SLURM_PROCID"] == own["SLURM_LOCALID"] == "1"
    assert own["SLURM_NTASKS"] == own["SLURM_TASKS_PER_NODE"] == "2"
    assert not [name for name in own if name.startswith("SLURM_STEP")]
    assert slurm_variables({"SLURM_CONF": "x"}, **TWO_NODES) == {}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("SLURM_CPUS_PER_TASK", "8", "4"),
        ("SRUN_CPUS_PER_TASK", "1", "1"),
        ("SLURM_GPUS_PER_TASK", "a100:2", "a100:1"),
        ("SLURM_TRES_PER_TASK", "cpu:8,gres/gpu:a100:2", "cpu:4,gres/gpu:a100:1"),
        ("SLURM_TRES_PER_TASK", "cpu=8", "cpu=4"),
        ("SLURM_GTIDS", "1", "2,3"),
        ("SLURM_NTASKS_PER_NODE", "1", "2"),
    ],
)
def test_resources_of_the_task_are_divided_among_its_ranks(name: str, given: str, expected: str) -> None:
    own = slurm_variables({"SLURM_JOB_ID": "1", name: given}, **TWO_NODES)
    assert (own[name], own[f"RANKWISE_AGENT_{name}"]) == (expected, given)


@pytest.mark.parametrize(("cpus", "expected"), [("2(x2)", None), ("4,1", "1"), ("1(x2)", "1"), ("?", None)])
def test_more_ranks_than_cpus_is_declared_as_srun_does(cpus: str, expected: str | None) -> None:
    own = slurm_variables({"SLURM_JOB_ID": "1", "SLURM_JOB_CPUS_PER_NODE": cpus}, **TWO_NODES)
    assert own.get("SLURM_OVERCOMMIT") == expected


def test_machines_may_have_different_numbers_of_ranks() -> None:
    around: dict[str, str] = dict.fromkeys(
        ("SLURM_JOB_ID", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_GTIDS"), "1"
    )
    where: dict[str, Any] = {"rank": 5, "local_rank": 0, "node_rank": 2, "ranks_per_node": (1, 4, 2)}
    own = slurm_variables(around, **where)
    assert own["SLURM_TASKS_PER_NODE"] == "1,4,2"
    assert own["SLURM_NTASKS_PER_NODE"] == "4"
    assert own["SLURM_GTIDS"] == "5,6"
    crowded = slurm_variables({"SLURM_JOB_ID": "1", "SLURM_JOB_CPUS_PER_NODE": "2(x3)"}, **where)
    assert crowded["SLURM_OVERCOMMIT"] == "1", "one of them has more ranks than CPUs"


@pytest.mark.parametrize("text", ["1", "2(x3),1", "1,2,1", "4(x1000)"])
def test_counts_are_written_as_they_are_read(text: str) -> None:
    assert format_counts(parse_counts(text, "NAME")) == text
