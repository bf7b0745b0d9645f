# SPDX-License-Identifier: Apache-2.0
"""``rankwise top`` and ``run --progress`` on two hosts: all ranks on each, and a launcher that does not answer."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

import rankwise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hosts import Hosts

    from tests.warm import Started

NUM_RANKS = 4
SLOW = 3
"""A rank that is not on rank zero's host."""
TRAIN = f"""
import pathlib, sys, time, torch, rankwise as rw
with rw.join() as world:
    model = rw.replicate(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        time.sleep(0.1 if world.rank == {SLOW} else 0.01)
        rw.log_value("loss", float("nan") if world.rank == {SLOW} else float(world.rank))
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        pathlib.Path(sys.argv[1], f"trains-{{world.rank}}").touch()
"""
SECONDS = 40.0
ENV = {
    "PYTHONPATH": str(Path(rankwise.__file__).parents[1]),
    "RANKWISE_SECRET": "of this test",
    "OMP_NUM_THREADS": "1",
}


class Job:
    """One launcher with two ranks per host; that of rank zero shows its progress on a terminal."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder
        script = folder / "train.py"
        script.write_text(TRAIN, encoding="utf-8")
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 200, 0, 0))
        with (folder / "host1.err").open("w", encoding="utf-8") as file:
            self.launchers = [self._start(0, script, theirs), self._start(1, script, file)]
        os.close(theirs)

    def _start(self, host: int, script: Path, stderr: IO[str] | int) -> Started:
        meeting = ["--rendezvous", f"{self._hosts.addresses[0]}:29400", "--nodes", "2", "--node-rank", str(host)]
        words = [sys.executable, "-m", "rankwise", "run", "-n", "2", "--progress", *meeting, str(script)]
        words.append(str(self._folder))
        return self._hosts.start(host, words, ENV, stdout=stderr, stderr=stderr)

    def top(self, host: int, *words: str) -> str:
        """Return what ``rankwise top`` prints on a host."""
        job = ["--job", str(self.launchers[host].pid)]
        shown = self._hosts.start(
            host,
            [sys.executable, "-m", "rankwise", "top", *job, *words],
            ENV,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, said = shown.communicate(timeout=SECONDS)
        assert shown.returncode == 0, said
        return out

    def wait_until_all_train(self) -> None:
        """Return when every rank has taken a step."""
        deadline = time.monotonic() + SECONDS
        while len(list(self._folder.glob("trains-*"))) < NUM_RANKS:
            assert time.monotonic() < deadline, self.said_on_second_host()
            time.sleep(0.02)

    def wait_until(self, host: int, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first answer to ``top --json`` on a host that is as the test expects."""
        deadline = time.monotonic() + SECONDS
        while not is_so(answer := json.loads(self.top(host, "--json"))):
            assert time.monotonic() < deadline, (answer, self.said_on_second_host())
        return answer

    def table(self, host: int, *, lacks_a_host: bool) -> list[str]:
        """Return the lines of ``top --once`` on a host, once a launcher has (not) answered.

        One may be too slow, and for a second the answers to an earlier request are shown.
        """
        deadline = time.monotonic() + SECONDS
        while (lines := self.top(host, "--once").splitlines())[-1].endswith(" did not answer") != lacks_a_host:
            assert time.monotonic() < deadline, lines
        return lines

    def read_until(self, text: str) -> str:
        """Return what rank zero's launcher has shown up to a text."""
        deadline, shown = time.monotonic() + SECONDS, b""
        while text not in shown.decode(errors="replace"):
            left = deadline - time.monotonic()
            assert left > 0, shown.decode()
            if select.select([self._terminal], [], [], left)[0]:
                shown += os.read(self._terminal, 65536)
        return shown.decode(errors="replace")

    def said_on_second_host(self) -> str:
        """Return what the other launcher has written."""
        return (self._folder / "host1.err").read_text(encoding="utf-8")

    def close(self) -> None:
        """End the launchers, with their ranks."""
        for launcher in self.launchers:
            launcher.kill()
        os.close(self._terminal)


@pytest.fixture
def job(hosts: Hosts, tmp_path: Path) -> Iterator[Job]:
    with contextlib.closing(Job(hosts, tmp_path)) as started:
        started.wait_until_all_train()
        yield started


@contextlib.contextmanager
def stopped(launcher: Started) -> Iterator[None]:
    os.kill(launcher.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(launcher.pid, signal.SIGCONT)


def has_all(answer: dict[str, Any]) -> bool:
    """Return whether all ranks have trained, and logged."""
    paces = answer["ranks"].values()
    return len(paces) == NUM_RANKS and all(pace["steps"] > 3 and pace["values"] for pace in paces)


def test_all_ranks_are_shown_on_each_host(job: Job) -> None:
    hosts = ["host0", "host0", "host1", "host1"]
    for host in (0, 1):
        answer = job.wait_until(host, has_all)
        assert [pace["host"] for pace in answer["ranks"].values()] == hosts
        assert [pace["values"]["loss"] for pace in answer["ranks"].values()] == [0.0, 1.0, 2.0, "nan"]
        assert (answer["values"], answer["unanswered"]) == ({"loss": "nan"}, [])
        head, *rows = job.table(host, lacks_a_host=False)
        assert [head.split()[place] for place in (0, 1, -1)] == ["rank", "host", "loss"]
        assert [row.split()[:2] for row in rows[:4]] == [[str(rank), name] for rank, name in enumerate(hosts)]
        assert [row.split()[-1] for row in rows[:4]] == ["0", "1", "2", "nan"]
        assert rows[4:] == ["", "loss nan"]
    job.read_until(f"loss nan (rank {SLOW}), slowest: rank {SLOW} on host1")
    assert "steps/s" not in job.said_on_second_host(), "one line for the whole job"


def test_a_launcher_that_does_not_answer_is_named_and_left_out(job: Job) -> None:
    for asked, silent in ((0, 1), (1, 0)):
        job.wait_until(asked, has_all)
        with stopped(job.launchers[silent]):
            rows = job.table(asked, lacks_a_host=True)
        assert [row.split()[:2] for row in rows[1:3]] == [[str(2 * asked + local), f"host{asked}"] for local in (0, 1)]
        assert rows[3:] == ["", "loss nan", f"host{silent} did not answer"]
    assert job.wait_until(0, has_all)["unanswered"] == []
