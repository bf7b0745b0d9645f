# SPDX-License-Identifier: Apache-2.0
"""Jobs on a real cluster of Ray: three nodes of two CPUs, as daemons of this machine."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from conftest import HERE, MOST_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Launcher

SCRIPTS = HERE / "scripts" / "on_ray"
TRAINING = str(SCRIPTS / "training.py")
ENDLESS = str(SCRIPTS / "endless.py")
INTERRUPTED = 130
MARK = "RANKWISE_TEST_RUN"
"""The variable of processes that belong to a test, and must end with it."""
TOLERANCE = 1e-10
pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module", autouse=True)
def _quiet_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Of torch in each daemon and worker.
        patch.setenv("OMP_NUM_THREADS", "1")
        # Ray kills actors for the memory that other programs of this machine use.
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        # How often Ray asks whether a node lives, and how often it may be silent: 3 s, and 5 times.
        patch.setenv("RAY_health_check_period_ms", "500")
        patch.setenv("RAY_health_check_failure_threshold", "2")
        yield


@pytest.fixture(scope="module")
def cluster(_quiet_ray: None) -> Iterator[str]:
    """The address of a cluster."""
    command = [sys.executable, str(SCRIPTS / "cluster.py")]
    # Without the mark of what belongs to a test.
    variables = {name: value for name, value in os.environ.items() if name != MARK}
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        pid, address = running.stdout.readline().split()
        with os.fdopen(os.pidfd_open(int(pid))) as ending:
            yield address
            running.communicate(timeout=MOST_SECONDS)
            assert select.select([ending], [], [], MOST_SECONDS)[0], "the cluster still runs"


def run_on(cluster: str, *words: str) -> list[str]:
    return ["-m", "rankwise", "run", f"--ray={cluster}", *words]


def trained_alone(launcher: Launcher) -> dict[str, torch.Tensor]:
    alone = launcher.folder / "alone"
    alone.mkdir()
    done = launcher.run(TRAINING, str(alone))
    assert done.returncode == 0, done.stderr
    return torch.load(alone / "0.pt")["state"]


def check_equal(expected: dict[str, torch.Tensor], folder: Path, num_ranks: int) -> list[dict[str, object]]:
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]
    for rank in ranks:
        for name, value in expected.items():
            torch.testing.assert_close(rank["state"][name], value, rtol=TOLERANCE, atol=TOLERANCE)
    return ranks


def test_a_lost_node_is_replaced_and_the_training_equals_one_rank(launcher: Launcher, cluster: str) -> None:
    expected = trained_alone(launcher)
    done = launcher.run(*run_on(cluster, "-n", "4", "--max-restarts", "1", TRAINING), str(launcher.folder), "2")
    assert done.returncode == 0, done.stderr
    ranks = check_equal(expected, launcher.folder, 4)
    assert [(one["size"], one["attempt"], one["source"]) for one in ranks] == [(4, "1", "rankwise")] * 4
    # The event of the job, what Ray does, and what follows.
    assert "was lost: its launcher has exited" in done.stderr
    assert "[rankwise] Ray has lost node 1, and starts it again: " in done.stderr
    assert "[rankwise] restart 1 of 1\n" in done.stderr


def test_a_function_returns_the_values_of_all_ranks_and_raises_what_one_raised(
    launcher: Launcher, cluster: str
) -> None:
    done = launcher.run(str(SCRIPTS / "function.py"), cluster)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    told = json.loads(last)
    assert told["values"] == [[rank, 1.0, "2", str(launcher.folder)] for rank in range(2)]
    assert sorted(lines) == [f"greetings of rank {rank}" for rank in range(2)]
    error, note = told["error"]
    assert error == "KeyError('the second')"
    assert note.startswith("[rank 1/2 on ")


def test_the_workers_of_ray_train_are_ranks(launcher: Launcher, cluster: str) -> None:
    expected = trained_alone(launcher)
    done = launcher.run(str(SCRIPTS / "trainer.py"), cluster, str(launcher.folder), "2")
    assert done.returncode == 0, done.stderr
    ranks = check_equal(expected, launcher.folder, 2)
    assert [(one["size"], one["source"]) for one in ranks] == [(2, "ray")] * 2


@pytest.mark.parametrize("way", ["ctrl-c", "actor killed"])
def test_a_job_is_cancelled_from_either_end(launcher: Launcher, cluster: str, way: str) -> None:
    running = launcher.start(*run_on(cluster, "-n", "2", "--nodes=2", ENDLESS, str(launcher.folder)))
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "all ranks run\n"
        told = [(launcher.folder / str(rank)).read_text().split() for rank in range(2)]
        processes = [os.pidfd_open(int(pid)) for pid, _ in told]
        if way == "ctrl-c":
            # As a terminal does it: everything in the foreground gets the signal.
            os.killpg(running.pid, signal.SIGINT)
        else:
            os.kill(int(told[1][1]), signal.SIGKILL)
        _, stderr = running.communicate(timeout=MOST_SECONDS)
        for process in processes:
            assert select.select([process], [], [], MOST_SECONDS)[0], "a rank still runs"
            os.close(process)
    finally:
        running.kill()
        running.communicate()
    if way == "ctrl-c":
        assert running.returncode == INTERRUPTED, stderr
    else:
        assert running.returncode == 1, stderr
        assert "rank 1 of 2" in next(line for line in stderr.splitlines() if "failed first" in line)


def test_what_the_cluster_cannot_do_is_an_error_at_once(launcher: Launcher, cluster: str) -> None:
    done = launcher.run(*run_on(cluster, "-n", "99", TRAINING), str(launcher.folder))
    assert done.returncode == 2
    assert "99 ranks with 1 CPU each were requested" in done.stderr
    assert "2 CPU: 2 ranks" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = launcher.run(*run_on(f"127.0.0.1:{port}", TRAINING), str(launcher.folder))
    assert done.returncode == 2
    assert f"No cluster of Ray answers at 127.0.0.1:{port}." in done.stderr
