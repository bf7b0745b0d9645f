# SPDX-License-Identifier: Apache-2.0
"""The ranks of one machine as their launcher sees them: messages of an earlier attempt are ignored."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.launch.agent.output import Output
from rankwise.launch.agent.ranks import STOPPED_SECONDS, LocalRanks
from rankwise.launch.fork_server.fork_server import ForkServer
from rankwise.launch.messages import RankExited, RanksCleared, RankStarted, StartAttempt, encode
from rankwise.launch.options import LaunchOptions
from rankwise.launch.rendezvous import JobAddress
from rankwise.launch.report import failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rankwise.launch.messages import FromForkServer


class Scene:
    """Two ranks, of which the process that starts them tells what the test has it tell."""

    def __init__(self, folder: Path, opened: ExitStack, instances: Sequence[str] = ()) -> None:
        ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reader, writer = os.pipe()
        output = Output()
        for close in (ours.close, self._theirs.close, output.close):
            opened.callback(close)
        for descriptor in (reader, writer):
            opened.callback(os.close, descriptor)
        self.folder = folder
        job = JobAddress(address=("localhost", 1), secret="s")  # noqa: S106 - of nothing
        self._server = ForkServer(ours, os.getpid())
        self.ranks = LocalRanks(
            2,
            job,
            LaunchOptions(),
            folder=str(folder),
            server=self._server,
            output=output,
            notify_pipe=reader,
            instances=instances,
        )

    def start(self, attempt: int, pid: int | None = None) -> None:
        for rank in range(2):
            self.tell(RankStarted(rank=rank, pid=os.getpid() if rank == 0 or pid is None else pid))
        self.ranks.start(
            StartAttempt(
                run_id="run",
                attempt=attempt,
                first_rank=0,
                world_size=2,
                node_rank=0,
                num_nodes=1,
                ranks_per_node="2",
            )
        )

    def told(self) -> dict[str, str]:
        """Return the variables of the next rank that the launcher has started."""
        text, descriptors, *_ = socket.recv_fds(self._theirs, 1 << 17, 3)
        for descriptor in descriptors:
            os.close(descriptor)
        variables: dict[str, str] = json.loads(text)["variables"]
        return variables

    def tell(self, message: FromForkServer) -> None:
        self._theirs.send(encode(message))

    def end(self, rank: int, attempt: int, exit_code: int) -> list[Any]:
        """Tell of an end; return what the launcher makes of it."""
        self.tell(RankExited(rank=rank, attempt=attempt, exit_code=exit_code, time=1.0))
        return self.ranks.receive([self._server.fileno()])


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Ranks that can be started."""
    with ExitStack() as opened:
        yield Scene(tmp_path, opened)


@pytest.mark.parametrize("instances", [(), ("MIG-a", "MIG-b")])
def test_each_rank_is_shown_one_instance_of_a_gpu(tmp_path: Path, instances: tuple[str, ...]) -> None:
    with ExitStack() as opened:
        scene = Scene(tmp_path, opened, instances)
        scene.start(0)
        shown = [scene.told().get("CUDA_VISIBLE_DEVICES") for _ in range(2)]
    assert shown == (list(instances) or [None, None])


@pytest.mark.parametrize("exit_code", [0, 1, -9, 75])
def test_an_end_of_an_earlier_attempt_ends_no_rank_of_this_one(scene: Scene, exit_code: int) -> None:
    scene.start(0)
    scene.tell(RanksCleared())
    scene.ranks.clear()
    scene.start(1)
    assert scene.end(0, 0, exit_code) == []
    assert scene.ranks.running == {0, 1}
    assert scene.ranks.failures == {}
    assert not scene.ranks.has_stopped


def test_a_rank_that_was_killed_for_a_restart_can_fail_in_the_next_attempt(scene: Scene) -> None:
    scene.start(0)
    scene.tell(RanksCleared())
    scene.ranks.clear()
    scene.start(1)
    (failed,) = scene.end(1, 1, -11)
    assert (failed.rank, failed.type) == (1, "SIGSEGV")
    assert scene.end(0, 1, 0) == []
    report = scene.ranks.report()
    assert report.failures == (failed,)
    assert report.ends[0] == "exited with code 0"


def test_an_end_of_this_attempt_is_received_once(scene: Scene) -> None:
    scene.start(0)
    (failed,) = scene.end(1, 0, 3)
    assert (failed.rank, failed.exit_code) == (1, 3)
    assert scene.ranks.running == {0}
    assert scene.end(1, 0, 3) == []
    assert scene.end(0, 0, 0) == []
    assert scene.ranks.running == set()


def test_a_ranks_own_report_is_kept_with_the_exit_of_its_process(scene: Scene) -> None:
    scene.start(0)
    failure.write(failure.from_exception(ValueError("boom"), 1, 1), str(scene.folder / "attempt-0-rank-1.json"))
    (written,) = scene.end(1, 0, -11)
    assert written.message == "boom"
    assert scene.ranks.failures[1] == replace(written, exit_code=-11)


def test_a_stopped_rank_is_reported_once(scene: Scene) -> None:
    with subprocess.Popen(["sleep", "1000"]) as stopped:
        try:
            stopped.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
            scene.start(0, stopped.pid)
            times = (0.0, STOPPED_SECONDS - 1, STOPPED_SECONDS, 10 * STOPPED_SECONDS)
            found = [scene.ranks.find_stopped(now, may_end=False) for now in times]
        finally:
            stopped.kill()
    assert [len(one) for one in found] == [0, 0, 1, 0]
    ((failed, pid),) = found[2]
    assert (failed.rank, failed.type, pid) == (1, "stopped", stopped.pid)
    assert scene.ranks.failures == {}
