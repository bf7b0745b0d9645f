# SPDX-License-Identifier: Apache-2.0
"""A job of ``rankwise run``, and others on the machine that find its port and do not know its secret."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Command

NUM_IDLE = 1000
GARBAGE = [
    b"GET / HTTP/1.0\r\n\r\n",
    b"\xff" * 4096,
    b"\x00" * 64,
    (2**31).to_bytes(4, "big") + b"x" * 100,
    (80).to_bytes(4, "big") + b"rankwise-wire/01" + b"n" * 32 + b"store" + b"p" * 27,
]
JOB = """
import os, pathlib
import rankwise as rw
with rw.join() as world:
    if world.rank == 0:
        pathlib.Path("address").write_text(os.environ["RANKWISE_STORE"])
    step, is_over = 0, False
    while not is_over:
        step += 1
        assert rw.all_reduce(step) == 2 * step
        if world.rank == 0:
            pathlib.Path("steps").write_text(str(step))
        is_over = rw.broadcast_object(os.path.exists("stop"))
"""


def _steps(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "steps").read_text())
    return 0


def _wait_for_steps(folder: Path, more: int) -> None:
    goal, deadline = _steps(folder) + more, time.monotonic() + 30
    while _steps(folder) < goal:
        assert time.monotonic() < deadline, "the job stands still"
        time.sleep(0.01)


def test_strangers_neither_read_nor_change_nor_stop_a_job(command: Command) -> None:
    command.write("train.py", JOB)
    job = command.start_python("-m", "rankwise", "run", "-n", "2", "train.py")
    try:
        _wait_for_steps(command.folder, 1)
        host, _, port = (command.folder / "address").read_text().partition(":")
        address = (host, int(port))
        assert host == "127.0.0.1"
        for data in GARBAGE:
            with socket.create_connection(address, 5) as stranger:
                stranger.settimeout(10)
                stranger.sendall(data)
                said = b""
                with contextlib.suppress(ConnectionError):
                    while more := stranger.recv(4096):
                        said += more
                assert b"attempt" not in said
        with pytest.raises(RuntimeError):
            dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
        _wait_for_steps(command.folder, 20)
        idle = [socket.create_connection(address, 10) for _ in range(NUM_IDLE)]
        _wait_for_steps(command.folder, 20)
        # Who holds the secret still comes in.
        looked = command.rankwise("stacks", "--job", str(job.pid), seconds=40)
        for stranger in idle:
            stranger.close()
        assert "train.py:" in looked.stdout, looked.stderr
    finally:
        (command.folder / "stop").touch()
        _, said_by_job = job.communicate(timeout=40)
    assert job.returncode == 0, said_by_job
    assert said_by_job.count("\n") == 3, "strangers are no news"


@pytest.fixture(autouse=True)
def _many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= NUM_IDLE + 200, f"the limit of open files is {hard}; {os.getpid()} needs more"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, NUM_IDLE + 500)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
