# SPDX-License-Identifier: Apache-2.0
"""Two jobs on one folder of checkpoints: the second gets an error, and a dead job's lock blocks no other job."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rankwise.checkpoint import folder_lock
from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.load import load
from rankwise.comm.join import join
from rankwise.data.loader import DataLoader
from rankwise.errors import CheckpointError, RankwiseError
from rankwise.health import fork_safety, process_probe
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Generator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path

    from rankwise.world.facts import World

ELSEWHERE = "gpu-07"


def _be_on(hostname: str) -> None:
    """Have this process count as one of another machine, and see signs of life sooner than users do."""
    if hostname:
        folder_lock.socket = _Named(hostname)  # type: ignore[assignment]
    folder_lock.REFRESH_SECONDS, folder_lock.WATCH_SECONDS = 0.2, 4.0


class _Named:
    def __init__(self, hostname: str) -> None:
        self.gethostname = lambda: hostname


def _job(connection: Connection, path: str, hostname: str) -> None:
    """Be a job of one rank that saves on request and reports the result."""
    _be_on(hostname)
    with join(device="cpu"):
        checkpoints = Checkpointer(path)
        while connection.recv() == "save":
            try:
                checkpoints.save(extra={"n": 1})
            except CheckpointError as error:
                connection.send(str(error))
            else:
                connection.send("saved")


class SaveJob:
    """A job in a process of its own."""

    def __init__(self, process: BaseProcess, connection: Any) -> None:
        self.process = process
        self._connection = connection

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def begin_save(self) -> None:
        self._connection.send("save")

    def outcome(self) -> str:
        assert self._connection.poll(50), "the job says nothing"
        return self._connection.recv()

    def save(self) -> str:
        self.begin_save()
        return self.outcome()

    def end(self) -> None:
        self._connection.send("end")
        self.process.join(20)
        assert self.process.exitcode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def _started(path: Path, hostname: str = "") -> Generator[SaveJob]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_job, args=(theirs, str(path), hostname))
    process.start()
    theirs.close()
    try:
        yield SaveJob(process, ours)
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _locks(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name.startswith(folder_lock.PREFIX))


def _save(world: World, path: str) -> str:
    del world
    _be_on("")
    try:
        return Checkpointer(path).save(extra={"n": 2}).name
    except RankwiseError as error:
        return f"{type(error).__name__} {error}"


@pytest.mark.parametrize("hostname", ["", ELSEWHERE], ids=["same machine", "another machine"])
def test_the_second_job_raises_on_every_rank_and_the_first_continues(tmp_path: Path, hostname: str) -> None:
    with _started(tmp_path, hostname) as first:
        assert first.save() == "saved"
        for result in run_ranks(_save, 2, str(tmp_path)):
            text = result.get()
            assert text.startswith(f"CheckpointError Another job saves into {tmp_path}.\n")
            assert f"process {first.pid} on {hostname or socket.gethostname()} (" in text
            assert "), since 20" in text
            assert f"kill {first.pid}" in text
            assert f"remove {folder_lock.PREFIX}1" in text
        assert first.save() == "saved"
        first.end()
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-000001", "checkpoint-000002"]
        assert [result.get() for result in run_ranks(_save, 2, str(tmp_path))] == ["checkpoint-000003"] * 2
    assert _locks(tmp_path) == []


def _read(world: World, path: str) -> list[str]:
    del world
    _be_on("")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    extra: dict[str, Any] = {}
    came_to = [str(load(f"{path}/checkpoint-000001", extra=extra)["extra"]["n"])]
    for objects in ({"extra": extra}, {"extra": extra, "loader": DataLoader(range(4), global_batch_size=2)}):
        try:
            Checkpointer(path).restore(**objects)
        except CheckpointError as error:
            came_to.append(error.what)
        else:
            came_to.append(str(extra["n"]))
    del optimizer
    return came_to


def test_reading_a_locked_folder_works_and_resuming_a_training_there_is_an_error(tmp_path: Path) -> None:
    with _started(tmp_path) as first:
        assert first.save() == "saved"
        for result in run_ranks(_read, 2, str(tmp_path)):
            assert result.get() == ["1", "1", f"Another job saves into {tmp_path}."]
        assert first.save() == "saved"


@pytest.mark.parametrize("hostname", ["", ELSEWHERE], ids=["same machine", "another machine"])
def test_the_lock_of_a_killed_job_blocks_no_other_job(tmp_path: Path, hostname: str) -> None:
    for number in range(1, 4):
        with _started(tmp_path, hostname) as job:
            assert job.save() == "saved"
            assert _locks(tmp_path) == [f"{folder_lock.PREFIX}{number}"]
            job.kill()


@pytest.mark.parametrize("content", [b"", b'{"hostname": "gpu', b"[1]", b'{"pid": []}'])
def test_a_lock_half_written_by_a_killed_job_blocks_no_other_job(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{folder_lock.PREFIX}7").write_bytes(content)
    with _started(tmp_path) as job:
        assert job.save() == "saved"
        assert _locks(tmp_path) == [f"{folder_lock.PREFIX}8"]


def test_a_job_that_was_stopped_for_long_finds_that_another_has_taken_its_place(tmp_path: Path) -> None:
    with _started(tmp_path, ELSEWHERE) as first, _started(tmp_path) as second:
        assert first.save() == "saved"
        os.kill(first.pid, signal.SIGSTOP)
        assert second.save() == "saved"
        os.kill(first.pid, signal.SIGCONT)
        assert f"process {second.pid} on {socket.gethostname()}" in first.save()
        assert second.save() == "saved"
        second.end()
        assert first.save() == "saved"


def test_a_stopped_process_of_this_machine_keeps_its_lock(tmp_path: Path) -> None:
    with _started(tmp_path) as first, _started(tmp_path) as second:
        assert first.save() == "saved"
        os.kill(first.pid, signal.SIGSTOP)
        assert f"process {first.pid} on" in second.save()
        os.kill(first.pid, signal.SIGCONT)
        assert first.save() == "saved"


def test_of_several_jobs_that_find_a_dead_lock_one_continues(tmp_path: Path) -> None:
    with _started(tmp_path) as first, _started(tmp_path) as a, _started(tmp_path) as b, _started(tmp_path) as c:
        assert first.save() == "saved"
        owns, jobs = first, [a, b, c]
        while len(jobs) > 1:
            owns.kill()
            for job in jobs:
                job.begin_save()
            outcomes = [job.outcome() for job in jobs]
            assert outcomes.count("saved") == 1, outcomes
            owns = jobs[outcomes.index("saved")]
            for job in jobs:
                assert (job.save() == "saved") == (job is owns)
            assert len(_locks(tmp_path)) == 1
            jobs.remove(owns)


def test_checkpointers_of_one_process_share_the_lock_until_the_last_is_closed(tmp_path: Path) -> None:
    (tmp_path / "other name").symlink_to(tmp_path)
    with join(device="cpu"), Checkpointer(tmp_path) as one:
        with Checkpointer(tmp_path / "other name") as two:
            one.save(extra={"n": 1})
            two.save(extra={"n": 2})
            assert _locks(tmp_path) == [f"{folder_lock.PREFIX}1"]
        assert _locks(tmp_path) == [f"{folder_lock.PREFIX}1"], "the other still holds it"
        one.save(extra={"n": 3})
        assert _locks(tmp_path) == [f"{folder_lock.PREFIX}1"]
        one.close()
        assert _locks(tmp_path) == []
        two.save(extra={"n": 4})
        assert _locks(tmp_path) == [f"{folder_lock.PREFIX}1"]
    assert _locks(tmp_path) == []


def test_a_child_that_ends_does_not_give_its_parents_lock_back(tmp_path: Path) -> None:
    with join(device="cpu"):
        checkpoints = Checkpointer(tmp_path)
        checkpoints.save(extra={"n": 1})
        child = os.fork()
        if child == 0:
            checkpoints._lock.release()
            folder_lock._remove_all()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert _locks(tmp_path) == [f"{folder_lock.PREFIX}1"]


def test_a_fork_waits_until_the_lock_is_refreshed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_refreshing, may_end = threading.Event(), threading.Event()
    steps: list[str] = []

    def refresh(_: object) -> None:
        is_refreshing.set()
        may_end.wait(20)
        steps.append("refreshed")

    def fork() -> None:
        with fork_safety.threads_are_known():
            child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        steps.append("forked")

    monkeypatch.setattr(folder_lock, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(folder_lock._HeldLock, "_refresh", refresh)
    with join(device="cpu"), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(extra={"n": 1})
        is_refreshing.wait(20)
        forks = threading.Thread(target=fork)
        forks.start()
        forks.join(0.2)
        assert steps == []
        may_end.set()
        forks.join(20)
        assert steps[0] == "refreshed"
        assert "forked" in steps


def test_a_lock_file_is_of_the_process_that_created_it_first(tmp_path: Path) -> None:
    path, first = tmp_path / f"{folder_lock.PREFIX}1", folder_lock.LockOwner.this_process()
    for owner in (first, dataclasses.replace(first, attempt=7)):
        folder_lock._create(path, owner)
    assert folder_lock.decode(path.read_bytes()) == first


def test_a_later_attempt_of_the_same_job_takes_the_lock_of_the_earlier_at_once() -> None:
    here = folder_lock.LockOwner.this_process()

    def of(job: str, attempt: int, hostname: str = ELSEWHERE) -> folder_lock.LockOwner:
        return dataclasses.replace(here, hostname=hostname, job=job, attempt=attempt)

    assert of("a", 0).is_running(of("a", 1, "gpu-08")) is False
    assert of("b", 0).is_running(of("a", 1, "gpu-08")) is None
    assert of("", 0).is_running(of("", 1, "gpu-08")) is None


def test_a_process_that_reuses_the_pid_of_a_dead_owner_is_not_mistaken_for_it() -> None:
    here, parent = folder_lock.LockOwner.this_process(), os.getppid()
    started = process_probe.start_time_of(parent)
    assert dataclasses.replace(here, pid=parent, start_time=started).is_running(here) is True
    assert dataclasses.replace(here, pid=parent, start_time=f"{started}0").is_running(here) is False
