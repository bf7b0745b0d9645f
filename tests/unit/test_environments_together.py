# SPDX-License-Identifier: Apache-2.0
"""Several launchers' variables in one process: they agree, complete one another, or are an error with both."""

from __future__ import annotations

import os

import pytest
from launcher_variables import ALONE, HYDRA, OPENMPI, PLAIN, SLURM, TORCHRUN, facts, golden

from rankwise.errors import ConfigurationError, EnvironmentConflict
from rankwise.world.environments import slurm
from rankwise.world.environments.process import of_one_process, read_process
from rankwise.world.environments.rankwise import variables_for
from rankwise.world.environments.table import TABLE, read

OWN = {
    name: value
    for name, value in variables_for(
        rank=1,
        world_size=2,
        local_rank=1,
        local_world_size=2,
        node_rank=0,
        num_nodes=1,
        ranks_per_node=[2],
        store=("localhost", 1),
        run_id="job",
        attempt="0",
        error_file="error",
        stack_file="stack",
        secret="known",  # noqa: S106 - of no job
        check=True,
        guard=True,
        report="folder",
        launcher="one",
    ).items()
    if not name.endswith("IFNAME")
}
"""What rankwise's launcher sets for a rank."""


@pytest.mark.parametrize(
    ("one", "other", "titles"),
    [
        (PLAIN, {**OPENMPI, "OMPI_COMM_WORLD_RANK": "2"}, ("plain env:// variables", "Open MPI")),
        (PLAIN, {**HYDRA, "PMI_SIZE": "8"}, ("plain env:// variables", "MPICH")),
        (PLAIN, SLURM, ("plain env:// variables", "Slurm")),
        ({**PLAIN, "RANK": "0", "WORLD_SIZE": "1"}, SLURM, ("plain env:// variables", "Slurm")),
        (OPENMPI, {"PMI_RANK": "0", "PMI_SIZE": "4"}, ("Open MPI", "PMI")),
        (OPENMPI, {**HYDRA, "PMI_RANK": "0"}, ("Open MPI", "MPICH")),
        (SLURM, {"PMI_RANK": "0", "PMI_SIZE": "4"}, ("Slurm", "PMI")),
    ],
)
def test_two_readings_that_disagree_are_an_error_with_both(
    one: dict[str, str], other: dict[str, str], titles: tuple[str, str]
) -> None:
    with pytest.raises(EnvironmentConflict) as caught:
        read({**one, **other}, launcher_process="77-8")
    text = str(caught.value)
    assert all(title in text for title in titles)
    assert all(f"{name}={value}" in text for name, value in one.items() if "RANK" in name and "NODE" not in name)
    assert "env -u " in text


@pytest.mark.parametrize("variables", [HYDRA, OPENMPI, OWN, PLAIN, SLURM, TORCHRUN])
def test_what_a_script_of_auto_starts_is_started_by_nobody(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    users = {"SLURM_JOB_ID": "7", "RANKWISE_DEVICE": "cpu"}
    for name, value in {**variables, **users}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with of_one_process():
        reading = read_process()
        assert (reading.source, reading.warns) == ("nobody", False)
        assert users.items() <= os.environ.items()
        assert not {name for name in os.environ if name.startswith("RANKWISE_")} & set(OWN)
    assert dict(os.environ) == before


def test_the_text_of_a_conflict() -> None:
    with pytest.raises(EnvironmentConflict) as caught:
        read({**PLAIN, **OPENMPI, "OMPI_COMM_WORLD_RANK": "2"})
    assert str(caught.value) == (
        "plain env:// variables and Open MPI disagree on the rank of this process.\n"
        "  evidence  plain env:// variables: rank 1 of 4, from RANK=1 WORLD_SIZE=4 "
        "MASTER_ADDR=job-master-0 "
        "MASTER_PORT=23456\n"
        "            Open MPI: rank 2 of 4, from OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 "
        "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4 MASTER_ADDR=job-master-0 "
        "MASTER_PORT=23456\n"
        "  do        keep Open MPI: env -u RANK -u WORLD_SIZE python ...\n"
        "            or keep plain env:// variables: env -u OMPI_COMM_WORLD_RANK "
        "-u OMPI_COMM_WORLD_SIZE "
        "-u OMPI_COMM_WORLD_LOCAL_RANK -u OMPI_COMM_WORLD_LOCAL_SIZE python ..."
    )


@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK"])
def test_the_fix_of_a_conflict_works(name: str) -> None:
    variables = {**PLAIN, **OPENMPI, "OMPI_COMM_WORLD_RANK": "2"}
    with pytest.raises(EnvironmentConflict) as caught:
        read(variables)
    (line,) = [line for line in (caught.value.do or "").splitlines() if f"-u {name} " in line]
    unset = line.split("-u ")[1:]
    for word in unset:
        del variables[word.split()[0]]
    assert read(variables).world_size == 4


def test_readings_that_agree_complete_one_another() -> None:
    by_hand = {"RANK": "2", "WORLD_SIZE": "4"}
    reading = read({**by_hand, **SLURM})
    assert facts(reading) == (2, 4, 0, 2, 1, 2)
    assert (reading.source, reading.address) == ("env", ("gpu07", slurm.step_port(12, 3)))


@pytest.mark.parametrize("launcher", [OPENMPI, HYDRA])
def test_mpi_in_an_allocation_is_not_slurm_whatever_its_daemons_step_says(
    launcher: dict[str, str],
) -> None:
    reading = read({**launcher, **SLURM}, launcher_process="77-8")
    assert facts(reading) == (1, 4, 1, 4, 0, 1)
    assert "variables of Slurm are also set" in reading.reason


def test_the_store_is_served_where_torchrun_says_so() -> None:
    assert read({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}).store_is_served
    assert not read({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).store_is_served


def test_a_rank_exported_for_one_process_is_no_contradiction() -> None:
    assert read({**SLURM, "RANK": "2"}).source == "slurm"
    with pytest.raises(ConfigurationError, match="WORLD_SIZE is not set"):
        read({**SLURM, "RANK": "0"})


def test_a_world_size_exported_for_a_whole_job_is_no_contradiction() -> None:
    assert read({**SLURM, "WORLD_SIZE": "4"}).source == "slurm"
    with pytest.raises(ConfigurationError, match="RANK is not set"):
        read({**SLURM, "WORLD_SIZE": "8"})


def test_a_shell_in_a_step_of_one_task_contradicts_no_launcher() -> None:
    shell = golden("slurm_one_task")[0]["variables"]
    assert read({**shell, **PLAIN}).source == "env"
    assert read({**shell, **OPENMPI}).source == "openmpi"


def test_an_environment_can_be_named() -> None:
    both = {**PLAIN, **OPENMPI, "OMPI_COMM_WORLD_RANK": "2"}
    assert read(both, environment="env").rank == 1
    assert read(both, environment="openmpi").rank == 2
    assert facts(read(both, environment="nobody")) == ALONE[0]
    with pytest.raises(ConfigurationError, match="Slurm did not start this process"):
        read(both, environment="slurm")
    with pytest.raises(ConfigurationError, match="Unknown environment 'sge'") as caught:
        read(both, environment="sge")
    assert all(row.name in (caught.value.do or "") for row in TABLE)
