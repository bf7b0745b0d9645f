# SPDX-License-Identifier: Apache-2.0
"""Who started a process: variables captured from real launchers, and those of rankwise itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launcher_variables import ALONE, GOLDEN, HYDRA, OPENMPI, OWN, PLAIN, SLURM, TORCHRUN, facts, golden

from rankwise.errors import ConfigurationError, EnvironmentConflict
from rankwise.world.environments.process import explicit, read_process
from rankwise.world.environments.rankwise import variables_for
from rankwise.world.environments.table import TABLE, read

if TYPE_CHECKING:
    from rankwise.world.environments.reading import Reading


def read_golden(name: str) -> list[Reading]:
    return [read(p["variables"], p["argv"], launcher_process="77-8") for p in golden(name)]


TWO_ON_ONE = [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]


TWO_BY_TWO = [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]


THREE_ON_ONE = [(0, 3, 0, 3, 0, 1), (1, 3, 1, 3, 0, 1), (2, 3, 2, 3, 0, 1)]


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
        "variables of Slurm are also set, from the job around it"
    )


@pytest.mark.parametrize("name", ["batch_script", "salloc"])
def test_a_job_without_a_step_is_one_rank_and_says_so(name: str) -> None:
    (reading,) = read_golden(name)
    assert reading.warns
    assert "start it with srun to get 4 ranks" in reading.reason


def test_no_launcher_is_a_world_of_one_without_a_warning() -> None:
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
    variables = variables_for(
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


def test_a_torchrun_that_a_rank_started_owns_its_processes() -> None:
    inner = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}
    assert facts(read({**OWN, **inner})) == facts(read(inner))
    assert read({**OWN, **inner}).source == "torchrun"
    assert read({**OWN, "TORCHELASTIC_RUN_ID": ""}).source == "rankwise"


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
    ("rank", "node_rank", "world_size", "expected"),
    [(0, 0, 4, 0), (1, 0, 4, 1), (2, 1, 4, 0), (3, 1, 4, 1), (1, 0, 5, None)],
    ids=["0", "1", "2", "3", "unequal machines"],
)
def test_a_virtual_local_rank_of_torchrun_is_not_the_local_rank(
    rank: int, node_rank: int, world_size: int, expected: int | None
) -> None:
    # As torchrun --virtual-local-rank sets them: every rank has LOCAL_RANK=0 and sees one GPU.
    numbers = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "GROUP_RANK": str(node_rank), "GROUP_WORLD_SIZE": "2"}
    variables = {**TORCHRUN, **numbers, "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"}
    assert read(variables).local_rank == expected


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
    with pytest.raises(EnvironmentConflict, match="given twice, with different values"):
        read(variables, ["train.py", "--local_rank=2"])
    with pytest.raises(ConfigurationError, match="--local_rank must be an integer >= 0, got ''"):
        read(PLAIN, ["train.py", "--local_rank"])


def test_this_process_is_read_from_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {name for row in TABLE for name in (*row.names, row.sign)}:
        monkeypatch.delenv(name, raising=False)
    assert read_process().source == "nobody"
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["train.py", "--local_rank=2"])
    assert read_process().local_rank == 2
    assert explicit("env://", None, None).address == ("job-master-0", 23456)
    with pytest.raises(ConfigurationError, match="Slurm did not start"):
        read_process("slurm")


def test_hydra_s_proxy_is_looked_for_among_the_processes_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in HYDRA.items():
        monkeypatch.setenv(name, value)
    own_parent = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1]
    name = Path(f"/proc/{own_parent}/comm").read_text().strip()
    monkeypatch.setattr("rankwise.world.environments.process.PROXIES", {"PMI_RANK": name})
    assert (read_process().job_key or "").startswith(f"mpich-{own_parent}-")
    monkeypatch.setattr("rankwise.world.environments.process.PROXIES", {"PMI_RANK": "no such process"})
    with pytest.raises(ConfigurationError, match="cannot be found"):
        read_process()
