# SPDX-License-Identifier: Apache-2.0
"""Running the real command, and finding every process it left by a mark in its environment."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from tests.warm import MARK, Started, WarmPython, variables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Streams = tuple["IO[str] | int", "IO[str] | int", "IO[str] | int"]
"""A command's stdin, stdout and stderr, as :class:`subprocess.Popen` takes them."""
USUAL: Streams = (subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE)


class Command:
    """Runs ``rankwise`` in a folder of its own; knows every process that came of it."""

    def __init__(self, folder: Path, warm_python: WarmPython, mark: str | None = None) -> None:
        self.folder = folder
        self._mark = mark or uuid.uuid4().hex
        self._warm_python = warm_python

    def inside(self, name: str) -> Command:
        """Return the same command in a new folder of this one."""
        ours = Command(self.folder / name, self._warm_python, self._mark)
        ours.folder.mkdir()
        return ours

    def write(self, name: str, text: str) -> Path:
        """Write a file of the test's program."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    def environment(self, **more: str) -> dict[str, str]:
        """Return this process's environment, marked."""
        return {**variables(), MARK: self._mark, **more}

    def run(self, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run ``rankwise run ...`` to its end."""
        return self.rankwise("run", *words, env=env)

    def rankwise(
        self, *words: str, env: dict[str, str] | None = None, seconds: float = 80
    ) -> subprocess.CompletedProcess[str]:
        """Run ``rankwise ...`` to its end, which may take ``seconds``."""
        return self.python("-m", "rankwise", *words, env=env, seconds=seconds)

    def python(
        self, *words: str, env: dict[str, str] | None = None, seconds: float = 80, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python ...`` to its end, which may take ``seconds``; its stdin is a pipe with ``text``, or nothing."""
        stdin = subprocess.DEVNULL if text is None else subprocess.PIPE
        with self.start_python(*words, env=env, stdin=stdin) as running:
            try:
                stdout, stderr = running.communicate(text, timeout=seconds)
            except BaseException:
                running.kill()
                raise
        # Before torch 2.10 Gloo writes this there, whatever the script says.
        stdout = re.sub(r"^\[Gloo\] Rank .*\n", "", stdout, flags=re.MULTILINE)
        return subprocess.CompletedProcess(running.args, running.wait(), stdout, stderr)

    def start(self, *words: str, env: dict[str, str] | None = None) -> Started:
        """Start ``rankwise run ...`` in a session of its own."""
        return self._start(["-m", "rankwise", "run", *words], env or {}, self.folder, session=True)

    def start_python(
        self,
        *words: str,
        env: dict[str, str] | None = None,
        session: bool = False,
        stdin: IO[str] | int = subprocess.DEVNULL,
        stdout: IO[str] | int = subprocess.PIPE,
        stderr: IO[str] | int = subprocess.PIPE,
    ) -> Started:
        """Start ``python ...``; the streams are as :class:`subprocess.Popen` takes them."""
        return self._start(words, env or {}, self.folder, session=session, streams=(stdin, stdout, stderr))

    def start_in(self, folder: Path, *words: str) -> Started:
        """Start ``rankwise run ...`` in another folder."""
        return self._start(["-m", "rankwise", "run", *words], {}, folder, session=False)

    def _start(
        self, words: Sequence[str], more: dict[str, str], folder: Path, *, session: bool, streams: Streams = USUAL
    ) -> Started:
        environment = self.environment(**more)
        stdin, stdout, stderr = streams
        if self._warm_python.can_start(environment):
            return self._warm_python.start(
                words, folder, environment, session=session, stdin=stdin, stdout=stdout, stderr=stderr
            )
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=session,
        )

    def words(self, *words: str) -> Sequence[str]:
        """Return the whole command line."""
        return [sys.executable, "-m", "rankwise", "run", *words]

    def processes(self) -> list[int]:
        """Return every living process that came of the command."""
        found: list[int] = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self._mark}".encode() in entry.read_bytes():
                    found.append(int(entry.parent.name))
        return found

    def siblings(self, process: int) -> list[int]:
        """Return the other processes with a process's parent: of one rank, the other ranks."""
        return [pid for pid in self.processes() if pid != process and _parent(pid) == _parent(process)]

    def wait_until_gone(self, pids: Sequence[int], seconds: float) -> list[int]:
        """Wait for processes that are not our children; return what is left after ``seconds``."""
        deadline = time.monotonic() + seconds
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
                os.close(descriptor)
        return self.processes()


@pytest.fixture
def command(tmp_path: Path, warm_python: WarmPython) -> Iterator[Command]:
    """The command, in an empty folder; afterwards nothing of it may be left."""
    ours = Command(tmp_path, warm_python)
    yield ours
    left = ours.wait_until_gone(ours.processes(), 5.0)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, "the command left processes behind"


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
