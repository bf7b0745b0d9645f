# SPDX-License-Identifier: Apache-2.0
"""What ``rankwise env`` says of sets of variables: every row, and why."""

from __future__ import annotations

import json

import pytest

from rankwise.cli.doctor import env_as_json as as_json
from rankwise.cli.doctor import env_as_text as as_text
from rankwise.world.environments.table import TABLE, Explanation, explain

ENV = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "gpu-00", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "gpu-[00-01]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
TORCHRUN = {**ENV, "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1", "GROUP_RANK": "0"}
SECRET = "plum-tree-17"  # noqa: S105 - of no job


def verdicts(explanation: Explanation) -> dict[str, tuple[str, str]]:
    return {row.name: (row.verdict, row.why) for row in explanation.rows if row.verdict != "not there"}


def test_every_row_of_the_table_is_reported_in_its_order() -> None:
    explanation = explain({})
    assert [row.name for row in explanation.rows] == [row.name for row in TABLE]
    assert {row.verdict for row in explanation.rows} == {"not there"}
    assert explanation.decided is not None
    assert explanation.decided.source == "nobody"


def test_variables_that_a_launcher_overrules_are_reported_with_the_reason() -> None:
    explanation = explain({**TORCHRUN, **SLURM, "SLURM_PROCID": "0"})
    assert explanation.decided is not None
    assert explanation.decided.source == "torchrun"
    over = "torchrun started this process; these variables describe the job around it"
    assert verdicts(explanation) == {
        "torchrun": ("found", "decides: TORCHELASTIC_RUN_ID is set, which only torch elastic's agent does"),
        "env": ("overruled", over),
        "slurm": ("overruled", over),
    }
    (slurm,) = [row for row in explanation.rows if row.name == "slurm"]
    assert ("SLURM_PROCID", "0") in slurm.variables
    assert (slurm.rank, slurm.world_size) == (0, 4)


def test_rows_that_agree_complete_each_other() -> None:
    explanation = explain({**ENV, **SLURM})
    assert verdicts(explanation)["slurm"] == (
        "found",
        "agrees with plain env:// variables, and adds facts that it leaves open",
    )
    assert explanation.decided is not None
    assert explanation.decided.node_rank == 0


def test_a_step_of_one_task_is_no_launch() -> None:
    one = {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    one |= {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "gpu-00"}
    explanation = explain({**ENV, **one})
    assert verdicts(explanation)["slurm"] == ("found", "a step of one task, in which another launcher was started")


def test_a_batch_script_is_in_no_step() -> None:
    explanation = explain({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    (slurm,) = [row for row in explanation.rows if row.name == "slurm"]
    assert (slurm.verdict, slurm.why) == ("not there", "SLURM_JOB_ID is set, but Slurm did not start this process")
    assert ("SLURM_PROCID", "0") in slurm.variables


@pytest.mark.parametrize(
    ("variables", "name", "verdict", "why"),
    [
        ({"RANK": "1"}, "env", "incomplete", "not set: WORLD_SIZE"),
        ({**SLURM, "SLURM_PROCID": ""}, "slurm", "incomplete", "not set: SLURM_PROCID"),
        ({**ENV, "RANK": "one"}, "env", "bad", "RANK must be an integer >= 0, got 'one'."),
        ({**ENV, **SLURM, "SLURM_PROCID": "3"}, "slurm", "found", "complete: "),
    ],
)
def test_an_undecidable_environment_is_reported_with_the_error_of_join(
    variables: dict[str, str], name: str, verdict: str, why: str
) -> None:
    explanation = explain(variables)
    assert explanation.decided is None
    assert explanation.error
    found = verdicts(explanation)[name]
    assert found[0] == verdict
    assert found[1].startswith(why)
    text = as_text(explanation)
    assert text.startswith("undecided; the script would fail with:\n  ")
    assert explanation.error.splitlines()[0] in text


@pytest.mark.parametrize("variables", [{}, ENV, TORCHRUN, SLURM, {**ENV, "RANK": "x"}])
def test_the_secret_is_never_shown(variables: dict[str, str]) -> None:
    explanation = explain({**variables, "RANKWISE_SECRET": SECRET, "RANKWISE_RUN_ID": ""})
    for shown in (as_text(explanation), as_json(explanation), repr(explanation)):
        assert SECRET not in shown
    assert "RANKWISE_SECRET is set\n" in as_text(explanation)
    assert json.loads(as_json(explanation))["secret_is_set"] is True


def test_the_text_of_a_rank() -> None:
    assert as_text(explain(ENV)) == (
        "rank 1 of 4, started by env\n"
        "  local rank  known once the ranks join\n"
        "  node        known once the ranks join\n"
        "  store       gpu-00, port 29500, served by rank 0\n"
        "  attempt     0\n"
        "  because     plain env:// variables: RANK=1 WORLD_SIZE=4 MASTER_ADDR=gpu-00 MASTER_PORT=29500, "
        "because RANK and WORLD_SIZE are set, but no launcher's own variable\n"
        "checked, in this order:\n"
        "  plain env:// variables  found  rank 1 of 4; decides: "
        "RANK and WORLD_SIZE are set, but no launcher's own variable\n"
        "                                 RANK=1 WORLD_SIZE=4 MASTER_ADDR=gpu-00 MASTER_PORT=29500\n"
        "  not there: rankwise, torchrun, Open MPI, MPICH, MVAPICH2, jsrun, Flux, Cray PALS, Slurm, PMI,\n"
        "    Kubeflow TrainJob, PAI-DLC, SageMaker, Vertex AI, TF_CONFIG, SkyPilot, dstack, AWS Batch, DGX\n"
        "    Cloud Lepton, an indexed Job or JobSet, PRRTE\n"
        "RANKWISE_SECRET is not set\n"
    )
