# SPDX-License-Identifier: Apache-2.0
"""Who started a process: variables captured from real launchers, and ways to be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise import environments
from rankwise.environments import slurm
from rankwise.environments.arguments import explicit
from rankwise.environments.table import TABLE, read
from rankwise.errors import ConfigurationError, EnvironmentConflict

if TYPE_CHECKING:
    from rankwise.environments.reading import Reading

GOLDEN = Path(__file__).parent / "golden" / "environments"
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
PLAIN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "7",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
}
OWN = environments.variables_for(
    rank=1,
    world_size=4,
    local_rank=1,
    local_world_size=2,
    node_rank=0,
    num_nodes=2,
    store=("127.0.0.1", 4321),
    run_id="job",
    attempt="2",
    error_file="/tmp/error.json",  # noqa: S108 - only a name
)


def golden(name: str) -> list[dict[str, Any]]:
    processes: list[dict[str, Any]] = json.loads((GOLDEN / f"{name}.json").read_text())["processes"]
    return processes


def read_golden(name: str) -> list[Reading]:
    return [read(p["variables"], p["argv"], launcher_process="77-8") for p in golden(name)]


def facts(reading: Reading) -> tuple[int | None, ...]:
    return (
        reading.rank,
        reading.world_size,
        reading.local_rank,
        reading.local_world_size,
        reading.node_rank,
        reading.num_nodes,
    )


TWO_ON_ONE = [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]
TWO_BY_TWO = [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]
THREE_ON_ONE = [(0, 3, 0, 3, 0, 1), (1, 3, 1, 3, 0, 1), (2, 3, 2, 3, 0, 1)]
ALONE = [(0, 1, None, None, None, None)]


@pytest.mark.parametrize(
    ("name", "source", "expected", "address"),
    [
        ("torchrun", "torchrun", TWO_ON_ONE, ("localhost", 44929)),
        ("torchrun_two_nodes", "torchrun", TWO_BY_TWO, ("localhost", 33097)),
        ("torchrun_in_batch_script", "torchrun", TWO_ON_ONE, ("n1", 37377)),
        ("torchrun_under_srun", "torchrun", TWO_BY_TWO, ("n2", 43175)),
        ("launch_use_env", "torchrun", TWO_ON_ONE, ("127.0.0.1", 29512)),
        ("launch_local_rank", "torchrun", TWO_ON_ONE, ("127.0.0.1", 29513)),
        ("openmpi", "openmpi", THREE_ON_ONE, None),
        ("mpich", "mpich", THREE_ON_ONE, None),
        ("slurm_two_nodes", "slurm", TWO_BY_TWO, ("n1", 20101)),
        (
            "slurm_uneven",
            "slurm",
            [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)],
            ("n1", 20404),
        ),
        ("slurm_one_node", "slurm", TWO_ON_ONE, None),
        ("slurm_one_task", "slurm", [(0, 1, 0, 1, 0, 1)], None),
        ("slurm_part_of_job", "slurm", TWO_ON_ONE, None),
        ("slurm_pmi2", "slurm", TWO_BY_TWO, ("n1", 20606)),
        ("batch_script", "nobody", ALONE, None),
        ("batch_from_step", "nobody", ALONE, None),
        ("salloc", "nobody", ALONE, None),
    ],
)
def test_real_launchers(
    name: str, source: str, expected: list[tuple[int | None, ...]], address: tuple[str, int] | None
) -> None:
    readings = read_golden(name)
    assert [facts(reading) for reading in readings] == expected
    assert {reading.source for reading in readings} == {source}
    assert {reading.address for reading in readings} == {address}
    assert {reading.store_is_served for reading in readings} == {source == "torchrun"}


@pytest.mark.parametrize("name", ["openmpi", "mpich", "slurm_one_node"])
def test_ranks_of_one_machine_share_a_key_that_fits_a_file_name(name: str) -> None:
    (key,) = {reading.job_key for reading in read_golden(name)}
    assert key is not None
    assert "/" not in key
    assert " " not in key


def test_every_golden_file_is_read_by_some_test() -> None:
    text = Path(__file__).read_text()
    assert [path.stem for path in GOLDEN.glob("*.json") if f'"{path.stem}"' not in text] == []


@pytest.mark.parametrize("name", ["openmpi_in_batch_script", "mpich_in_batch_script"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_mpi_over_machines_needs_an_address_and_never_takes_localhost(name: str, rank: int) -> None:
    process = golden(name)[rank]
    with pytest.raises(ConfigurationError, match="cannot be found") as caught:
        read(process["variables"], process["argv"], launcher_process="77-8")
    assert "MASTER_ADDR" in (caught.value.do or "")
    with_address = {**process["variables"], "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    reading = read(with_address, process["argv"])
    assert (reading.rank, reading.world_size, reading.address) == (rank, 3, ("n1", 29500))
    assert reading.num_nodes is None


def test_reason_names_the_variables_the_mark_and_the_surroundings() -> None:
    reason = read_golden("torchrun_in_batch_script")[1].reason
    assert reason == (
        "torchrun: RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 "
        "GROUP_WORLD_SIZE=1 MASTER_ADDR=n1 MASTER_PORT=37377 TORCHELASTIC_USE_AGENT_STORE=True "
        "TORCHELASTIC_RESTART_COUNT=0, "
        "because TORCHELASTIC_RUN_ID is set, which only torch elastic's agent does; "
        "variables of Slurm are there too, from the job around it"
    )


@pytest.mark.parametrize("name", ["batch_script", "salloc"])
def test_a_job_without_a_step_is_one_rank_and_says_so(name: str) -> None:
    (reading,) = read_golden(name)
    assert reading.warns
    assert "start it with srun to get 4 ranks" in reading.reason


def test_nobody_is_a_world_of_one_without_a_warning() -> None:
    reading = read({"HOME": "/root", "MASTER_ADDR": "n1"}, ["train.py", "--local_rank=1"])
    assert facts(reading) == ALONE[0]
    assert not reading.warns


def test_own_variables_round_trip() -> None:
    reading = read(OWN)
    assert facts(reading) == (1, 4, 1, 2, 0, 2)
    assert (reading.source, reading.attempt, reading.address) == (
        "rankwise",
        "2",
        ("127.0.0.1", 4321),
    )
    assert reading.store_is_served


@given(
    num_nodes=st.integers(1, 5),
    local_world_size=st.integers(1, 8),
    place=st.data(),
    host=st.sampled_from(["127.0.0.1", "gpu-01", "fd00::2"]),
)
def test_own_variables_round_trip_for_every_world(
    num_nodes: int, local_world_size: int, place: st.DataObject, host: str
) -> None:
    node_rank = place.draw(st.integers(0, num_nodes - 1))
    local_rank = place.draw(st.integers(0, local_world_size - 1))
    rank, world_size = node_rank * local_world_size + local_rank, num_nodes * local_world_size
    variables = environments.variables_for(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        store=(host, 29500),
        run_id="job",
        attempt="0",
        error_file="error.json",
    )
    reading = read(variables)
    assert facts(reading) == (rank, world_size, local_rank, local_world_size, node_rank, num_nodes)
    assert reading.address == (host, 29500)


@pytest.mark.parametrize("around", [TORCHRUN, OPENMPI, HYDRA, SLURM, {"RANK": "x", "PMI_RANK": "-1"}])
def test_rankwise_owns_its_processes_whatever_surrounds_them(around: dict[str, str]) -> None:
    reading = read({**around, **OWN})
    assert facts(reading) == (1, 4, 1, 2, 0, 2)
    assert (reading.source, reading.attempt) == ("rankwise", "2")


@pytest.mark.parametrize("around", [OPENMPI, HYDRA, SLURM, {"OMPI_COMM_WORLD_SIZE": "9"}])
def test_torchrun_owns_its_processes_whatever_surrounds_them(around: dict[str, str]) -> None:
    assert read({**around, **TORCHRUN}).source == "torchrun"


@pytest.mark.parametrize(
    ("num_nodes", "attempt"),
    [("1", "3"), ("2", "0")],
    ids=["one machine", "counts differ between machines"],
)
def test_the_restart_count_of_torchrun_names_an_attempt_on_one_machine_only(num_nodes: str, attempt: str) -> None:
    variables = {**TORCHRUN, "GROUP_WORLD_SIZE": num_nodes, "TORCHELASTIC_RESTART_COUNT": "3"}
    assert read(variables).attempt == attempt


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
    assert "MASTER_ADDR" in (caught.value.do or "")


def test_hydra_without_its_process_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="cannot be found") as caught:
        read(HYDRA)
    assert "-genv MASTER_ADDR" in (caught.value.do or "")


def test_a_plain_world_of_one_needs_no_address() -> None:
    assert facts(read({"RANK": "0", "WORLD_SIZE": "1"}))[:2] == (0, 1)


@pytest.mark.parametrize(
    ("word", "following"), [("--local_rank=3", []), ("--local-rank=3", []), ("--local_rank", ["3"])]
)
def test_the_local_rank_may_stand_among_the_arguments(word: str, following: list[str]) -> None:
    assert read(PLAIN, ["train.py", "--lr=1", word, *following]).local_rank == 3


def test_the_local_rank_given_twice_must_agree() -> None:
    variables = {**PLAIN, "LOCAL_RANK": "1"}
    assert read(variables, ["train.py", "--local_rank=1"]).local_rank == 1
    with pytest.raises(EnvironmentConflict, match="twice"):
        read(variables, ["train.py", "--local_rank=2"])
    with pytest.raises(ConfigurationError, match="--local_rank=''"):
        read(PLAIN, ["train.py", "--local_rank"])


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


def test_the_text_of_a_conflict() -> None:
    with pytest.raises(EnvironmentConflict) as caught:
        read({**PLAIN, **OPENMPI, "OMPI_COMM_WORLD_RANK": "2"})
    assert str(caught.value) == (
        "plain env:// variables and Open MPI disagree on who this process is.\n"
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
def test_the_fix_of_a_conflict_mends_it(name: str) -> None:
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
    assert "variables of Slurm are there too" in reading.reason


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


def test_a_shell_in_a_step_of_one_task_contradicts_nobody() -> None:
    shell = golden("slurm_one_task")[0]["variables"]
    assert read({**shell, **PLAIN}).source == "env"
    assert read({**shell, **OPENMPI}).source == "openmpi"


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
def test_a_value_that_is_no_number_is_named(variables: dict[str, str], bad: str, value: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(variables)
    assert caught.value.what.startswith(f"{bad}={value!r}")


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_out_of_range_is_an_error(port: str) -> None:
    with pytest.raises(ConfigurationError, match=f"MASTER_PORT names port {port}"):
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
    with pytest.raises(ConfigurationError, match="do not fit together"):
        read({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,1"})


def test_the_user_s_address_goes_before_slurm_s() -> None:
    assert read({**SLURM, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"}).address == (
        "10.0.0.7",
        4000,
    )
    assert read({**SLURM, "MASTER_PORT": "4000"}).address == ("gpu07", 4000)
    assert read({**SLURM, "MASTER_ADDR": "10.0.0.7"}).address == (
        "10.0.0.7",
        slurm.step_port(12, 3),
    )


def test_a_requeued_job_is_another_attempt() -> None:
    first, second = read(SLURM), read({**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert (first.attempt, second.attempt) == ("0", "1")
    assert first.job_key != second.job_key


@pytest.mark.parametrize("step", [0, 7, 4294967290])
def test_the_port_of_a_step_is_in_the_documented_range(step: int) -> None:
    assert 20000 <= slurm.step_port(123456, step) <= 29999
    assert slurm.step_port(123456, step) != slurm.step_port(123456, step + 1)
    assert slurm.step_port(123456, step) != slurm.step_port(123457, step)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", ["n1"]),
        ("gpu[001-003,7],login1", ["gpu001", "gpu002", "gpu003", "gpu7", "login1"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("r[1-2]n[1,3]-ib", ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]),
        ("a,b[2]", ["a", "b2"]),
    ],
)
def test_host_lists(text: str, expected: list[str]) -> None:
    assert list(environments.hosts(text)) == expected


@pytest.mark.parametrize("text", ["", "n[1-3", "n1-3]", "n[]", "n[3-1]", "n[a-b]", "a,,b", ",a", "n[[1]]"])
def test_a_bad_host_list_is_an_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match="not a Slurm list"):
        list(environments.hosts(text))


def test_a_long_host_list_costs_nothing_until_it_is_read() -> None:
    assert next(environments.hosts("n[1-999999999999]")) == "n1"


def test_tasks_per_node() -> None:
    assert slurm.tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ConfigurationError, match="cannot be read"):
        slurm.tasks_per_node("2(x)")


def test_an_environment_can_be_named() -> None:
    both = {**PLAIN, **OPENMPI, "OMPI_COMM_WORLD_RANK": "2"}
    assert read(both, environment="env").rank == 1
    assert read(both, environment="openmpi").rank == 2
    assert facts(read(both, environment="nobody")) == ALONE[0]
    with pytest.raises(ConfigurationError, match="Slurm did not start this process"):
        read(both, environment="slurm")
    with pytest.raises(ConfigurationError, match="There is no environment 'sge'") as caught:
        read(both, environment="sge")
    assert all(row.name in (caught.value.do or "") for row in TABLE)


def test_explicit_addresses() -> None:
    reading = explicit("tcp://gpu-01:29500", 1, 2, variables=SLURM)
    assert (reading.rank, reading.world_size, reading.address) == (1, 2, ("gpu-01", 29500))
    assert explicit("tcp://[fd00::2]:29500", 0, 1, variables={}).address == ("fd00::2", 29500)
    assert explicit("file:///shared/a%20job", 0, 3, variables={}).file == "/shared/a job"


@pytest.mark.parametrize(
    "init_method",
    [
        "",
        "gpu-01:29500",
        "tcp://gpu-01",
        "tcp://:29500",
        "tcp://gpu-01:port",
        "tcp://gpu-01:99999",
        "tcp://gpu-01:0",
        "tcp://gpu-01:29500/path",
        "tcp://gpu-01:29500?rank=0",
        "file://relative/path",
        "file:///",
        "env://host",
        "http://gpu-01:29500",
    ],
)
def test_bad_init_methods_are_refused_with_an_example(init_method: str) -> None:
    with pytest.raises(ConfigurationError, match=r"init_method|port") as caught:
        explicit(init_method, 0, 2, variables={})
    assert "29500" in (caught.value.do or "")


@pytest.mark.parametrize(
    ("rank", "world_size", "text"),
    [
        (None, 2, "needs rank too"),
        (0, None, "needs world_size too"),
        (None, None, "needs rank and world_size too"),
        (2, 2, "rank=2 does not fit world_size=2"),
        (-1, 2, "rank=-1"),
        (0, 0, "world_size=0"),
        ("0", 2, "rank='0' is not a whole number"),
        (0, True, "world_size=True is not a whole number"),
    ],
)
def test_explicit_addresses_need_good_numbers(rank: Any, world_size: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        explicit("tcp://gpu-01:29500", rank, world_size, variables={})


def test_env_takes_the_variables_and_the_arguments_go_first() -> None:
    assert explicit("env://", None, None, variables=PLAIN).rank == 1
    variables = {**PLAIN, "LOCAL_RANK": "1"}
    reading = explicit("env://", 5, 8, variables=variables, argv=["train.py", "--local_rank=1"])
    assert (reading.rank, reading.world_size, reading.local_rank) == (5, 8, None)
    assert reading.address == ("job-master-0", 23456)
    assert "from the arguments" in reading.reason
    same = explicit("env://", 1, 4, variables=variables)
    assert same.local_rank == 1


def test_env_under_torchrun_uses_the_store_that_is_served() -> None:
    variables = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    reading = explicit("env://", None, None, variables=variables)
    assert (reading.source, reading.store_is_served) == ("torchrun", True)


def test_env_ignores_what_the_user_did_not_name() -> None:
    assert explicit("env://", None, None, variables={**SLURM, **PLAIN}).source == "env"


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "RANK, WORLD_SIZE are not set"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "cannot be found"),
        ({**PLAIN, "RANK": "9"}, "rank=9 does not fit world_size=4"),
    ],
)
def test_env_needs_a_complete_set(variables: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        explicit("env://", None, None, variables=variables)


def test_this_process_is_read_from_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {name for row in TABLE for name in (*row.names, row.sign)}:
        monkeypatch.delenv(name, raising=False)
    assert environments.read_process().source == "nobody"
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["train.py", "--local_rank=2"])
    assert environments.read_process().local_rank == 2
    assert environments.explicit("env://", None, None).address == ("job-master-0", 23456)
    with pytest.raises(ConfigurationError, match="Slurm did not start"):
        environments.read_process("slurm")


def test_hydra_s_proxy_is_looked_for_among_the_processes_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in HYDRA.items():
        monkeypatch.setenv(name, value)
    own_parent = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1]
    name = Path(f"/proc/{own_parent}/comm").read_text().strip()
    monkeypatch.setattr("rankwise.environments.process.HYDRA_PROXY", name)
    assert (environments.read_process().job_key or "").startswith(f"mpich-{own_parent}-")
    monkeypatch.setattr("rankwise.environments.process.HYDRA_PROXY", "no such process")
    with pytest.raises(ConfigurationError, match="cannot be found"):
        environments.read_process()


SECRET = "correct horse battery staple"  # noqa: S105 - of no job


@pytest.mark.parametrize("around", [PLAIN, OPENMPI, HYDRA, SLURM, OWN, {"PMI_RANK": "0", "PMI_SIZE": "1"}])
def test_the_secret_is_read_beside_every_launcher_that_leaves_the_store_to_us(around: dict[str, str]) -> None:
    around = {"MASTER_ADDR": "gpu-07", "MASTER_PORT": "29500", **around}
    assert read({**around, "RANKWISE_SECRET": SECRET}).secret == SECRET
    assert read(around).secret is None
    assert read({**around, "RANKWISE_SECRET": ""}).secret is None


def test_torchruns_own_store_has_no_secret() -> None:
    assert read({**TORCHRUN, "RANKWISE_SECRET": SECRET}).secret is None


def test_the_secret_is_read_beside_an_explicit_address() -> None:
    reading = explicit("tcp://gpu-01:29500", 0, 2, variables={"RANKWISE_SECRET": SECRET})
    assert reading.secret == SECRET
    assert explicit("env://", None, None, variables={**PLAIN, "RANKWISE_SECRET": SECRET}).secret == SECRET


@pytest.mark.parametrize("around", [PLAIN, TORCHRUN, OPENMPI, HYDRA, SLURM, OWN])
@pytest.mark.parametrize("wrong", [{}, {"RANK": "x"}, {"WORLD_SIZE": "0"}, {"MASTER_PORT": "x"}, {"RANK": "7"}])
def test_the_secret_is_never_shown(around: dict[str, str], wrong: dict[str, str]) -> None:
    variables = {**around, **wrong, "RANKWISE_SECRET": SECRET}
    try:
        reading = read(variables)
    except ConfigurationError as error:
        assert SECRET not in f"{error} {error!r}"
    else:
        assert SECRET not in f"{reading} {reading!r} {reading.reason}"
