# SPDX-License-Identifier: Apache-2.0
"""Variables of a launcher that are incomplete, no numbers, or do not fit together."""

from __future__ import annotations

import traceback

import pytest
from launcher_variables import HYDRA, OPENMPI, OWN, PLAIN, SLURM, TORCHRUN

import rankwise as rw
from rankwise.errors import ConfigurationError
from rankwise.world import network
from rankwise.world.environments.process import explicit
from rankwise.world.environments.table import read

MOST_LINES = 12


@pytest.mark.parametrize(
    ("complete", "missing"),
    [
        (TORCHRUN, "RANK"),
        (TORCHRUN, "WORLD_SIZE"),
        (TORCHRUN, "MASTER_ADDR"),
        (OWN, "RANKWISE_STORE"),
        (OWN, "LOCAL_RANK"),
        (PLAIN, "RANK"),
        (PLAIN, "WORLD_SIZE"),
        (OPENMPI, "OMPI_COMM_WORLD_SIZE"),
        (OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK"),
        (HYDRA, "PMI_SIZE"),
        (HYDRA, "MPI_LOCALNRANKS"),
        (SLURM, "SLURM_PROCID"),
        (SLURM, "SLURM_STEP_NODELIST"),
    ],
)
@pytest.mark.parametrize("how", ["unset", "empty"])
def test_an_incomplete_set_names_what_is_missing(complete: dict[str, str], missing: str, how: str) -> None:
    variables = {name: value for name, value in complete.items() if name != missing}
    if how == "empty":
        variables[missing] = ""
    with pytest.raises(ConfigurationError, match=rf"incomplete: {missing} is not set") as caught:
        read(variables, launcher_process="77-8")
    assert "=" in (caught.value.evidence or "")


def test_a_plain_set_of_one_machine_without_address_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="Rank 0 of 2 ranks cannot be found") as caught:
        read({"RANK": "0", "WORLD_SIZE": "2"})
    assert "env -u RANK -u WORLD_SIZE python" in (caught.value.do or "")
    assert "MASTER_ADDR" in (caught.value.do or "")


def test_hydra_without_its_process_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="cannot be found") as caught:
        read(HYDRA)
    assert "-genv MASTER_ADDR" in (caught.value.do or "")


@pytest.mark.parametrize(
    ("variables", "bad", "value"),
    [
        ({**TORCHRUN, "RANK": "one"}, "RANK", "one"),
        ({**TORCHRUN, "WORLD_SIZE": "2.0"}, "WORLD_SIZE", "2.0"),
        ({**PLAIN, "RANK": "-1"}, "RANK", "-1"),
        ({**PLAIN, "RANK": "\u0663"}, "RANK", "\u0663"),
        ({**PLAIN, "MASTER_PORT": "http"}, "MASTER_PORT", "http"),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "four"}, "OMPI_COMM_WORLD_SIZE", "four"),
        ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID", "x"),
        ({**OWN, "RANKWISE_STORE": "4321"}, "RANKWISE_STORE", "4321"),
    ],
)
def test_a_value_that_is_not_a_number_is_named(variables: dict[str, str], bad: str, value: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(variables)
    assert str(caught.value.what).startswith(bad)
    assert repr(value) in str(caught.value.what)


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_out_of_range_is_an_error(port: str) -> None:
    with pytest.raises(ConfigurationError, match=f"The port in MASTER_PORT must be 1 to 65535, got {port}"):
        read({**PLAIN, "MASTER_PORT": port})


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({**PLAIN, "RANK": "4"}, "rank 4 of 4"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 of 0"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local_rank 2 of 2"),
        ({**TORCHRUN, "GROUP_RANK": "1"}, "node_rank 1 of 1"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, "local_world_size 3 of world_size 2"),
    ],
)
def test_numbers_that_do_not_fit_are_an_error(variables: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        read(variables)
    assert "RANK=" in (caught.value.evidence or "")


def test_a_slurm_step_whose_numbers_do_not_fit_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="are inconsistent"):
        read({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,1"})


def test_one_machine_of_slurm_needs_no_tasks_per_node() -> None:
    one = {**SLURM, "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    one |= {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": ""}
    one.pop("SLURM_TASKS_PER_NODE", None)
    reading = read(one)
    assert (reading.rank, reading.world_size, reading.local_world_size, reading.num_nodes) == (1, 2, 2, 1)
    with pytest.raises(ConfigurationError, match="incomplete: SLURM_STEP_TASKS_PER_NODE is not set"):
        read({**one, "SLURM_STEP_NODELIST": "n[1-2]"})


def test_a_list_of_machines_as_an_address_is_named() -> None:
    with pytest.raises(ConfigurationError, match="it has a list of machines in place of one") as caught:
        explicit("tcp://host[0-1]:29500", 0, 2)
    assert "scontrol show hostnames" in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"'host\[0-1\]' is a list of machines") as caught:
        network.resolve("host[0-1]")
    assert "scontrol show hostnames 'host[0-1]'" in (caught.value.do or "")


@pytest.mark.parametrize("left_over", [{"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1"}])
def test_variables_left_over_in_a_shell_are_told_in_a_few_lines(
    monkeypatch: pytest.MonkeyPatch, left_over: dict[str, str]
) -> None:
    for name, value in left_over.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="RANK") as caught:
        rw.join()
    assert len("".join(traceback.format_exception(caught.value)).splitlines()) <= MOST_LINES
