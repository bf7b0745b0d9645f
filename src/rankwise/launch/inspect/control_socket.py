# SPDX-License-Identifier: Apache-2.0
"""Queries to a running launcher from another terminal: a socket in the job's own folder.

Only the user who started the job, and root, can reach it. Request and answer are a line of JSON each. No torch.
Imported by the agent, which answers, and by the command line, which asks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import stat
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rankwise.errors import ConfigurationError, LaunchError, RankwiseError, fold_ranks
from rankwise.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

FOLDER_PREFIX = "rankwise-"
"""Prefix of the name of every job's temporary folder."""
REQUEST_SECONDS = 1.0
"""How long the launcher waits for a request: it also supervises ranks."""
CONTROL_ANSWER_SECONDS = 20.0
LONGEST_REQUEST_BYTES = 2**16
_SOCKET = "control"
_ABOUT = "job.json"
_FACTS = {"pid", "ranks", "command", "version", "python"}
"""What a launcher says about itself there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningJob:
    """A launcher that runs on this machine."""

    folder: str
    pid: int
    command: list[str]
    """As it was typed."""
    ranks: list[int]
    """Those of this machine."""
    version: str
    """Of its rankwise."""
    python: str
    """The interpreter that runs it."""


class ControlSocket:
    """The launcher's end: listens until closed. Close it with the job."""

    def __init__(self, folder: str, *, ranks: list[int] | None = None, command: list[str] | None = None) -> None:
        """Listen in the job's temporary folder, which only this user can read; ``command`` is as typed."""
        about = {
            "pid": os.getpid(),
            "ranks": ranks or [],
            "command": sys.argv if command is None else command,
            "version": VERSION,
            "python": sys.executable,
        }
        (Path(folder) / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _address(folder) as address:
            self._listener.bind(address)
        self._listener.listen(8)
        self._listener.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is a request."""
        return self._listener.fileno()

    def serve_one(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Answer one request; an invalid request, or an error of ``answer``, is sent to the requester."""
        try:
            connection, _ = self._listener.accept()
        except OSError:  # already closed, or no descriptors are left
            return
        with connection, contextlib.suppress(OSError):
            connection.settimeout(REQUEST_SECONDS)
            if _user_of(connection) not in {os.getuid(), 0}:
                return
            line = _read_line(connection, LONGEST_REQUEST_BYTES)
            if line is None:
                return
            connection.sendall(json.dumps(_answered(line, answer)).encode() + b"\n")

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


def jobs() -> list[RunningJob]:
    """Return the launchers of this user that run on this machine."""
    found: list[RunningJob] = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            facts = folder.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
                continue
            about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
            with _connected(str(folder)):  # the socket of a killed launcher has no listener
                # Another version may say more.
                known = {name: about[name] for name in _FACTS}
                found.append(RunningJob(folder=str(folder), **known))
    return found


def only_job(pid: int | None, command: str) -> RunningJob:
    """Return the job whose launcher is process ``pid``, or the only one of this user here.

    Raises:
        ConfigurationError: there is none, or several; the error shows how ``rankwise command`` chooses one. Or it is of
            another version of rankwise, which would not understand the question, nor this one the answer.
    """
    running = jobs()
    listed = "\n".join(f"{job.pid}: {fold_ranks(job.ranks)}: {shlex.join(job.command)}" for job in running)
    if not running:
        raise ConfigurationError(
            "You have no job on this machine that `rankwise run` has started.",
            do="run this on the job's machine, as the same user and with the same TMPDIR",
        )
    if pid is None and len(running) > 1:
        raise ConfigurationError(
            f"You have {len(running)} jobs on this machine.",
            evidence=listed,
            do=f"choose one: rankwise {command} --job {running[0].pid}",
        )
    for job in running:
        if pid in {None, job.pid}:
            return _of_this_version(job, command)
    raise ConfigurationError(f"Process {pid} is not the launcher of a job.", evidence=listed, do="choose one of these")


def _of_this_version(job: RunningJob, command: str) -> RunningJob:
    if job.version != VERSION:
        raise ConfigurationError(
            f"The job {job.pid} runs with rankwise {job.version}, and this is {VERSION}.",
            do=f"use the rankwise of that job: {shlex.quote(job.python)} -m rankwise {command} --job {job.pid}",
        )
    return job


def ask(job: RunningJob, request: dict[str, Any], timeout_seconds: float = CONTROL_ANSWER_SECONDS) -> dict[str, Any]:
    """Ask a launcher, and return its answer.

    Raises:
        LaunchError: it has exited, or does not answer.
    """
    try:
        with _connected(job.folder) as connection:
            connection.settimeout(timeout_seconds)
            connection.sendall(json.dumps(request).encode() + b"\n")
            line = _read_line(connection, None)
        answer = json.loads(line or b"")
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"The launcher {job.pid} did not answer: {error}.", do="check whether it still runs: rankwise stacks"
        ) from error
    if not isinstance(answer, dict) or "error" in answer:
        evidence = str(answer["error"] if isinstance(answer, dict) else answer)
        do = "if its job has just ended, there is nothing to show; otherwise try again: rankwise stacks"
        raise LaunchError(f"The launcher {job.pid} could not answer.", evidence=evidence, do=do)
    return answer


def _answered(line: bytes, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            return {"error": "a request must be a JSON object"}
        return answer(request)
    except (RankwiseError, OSError, ValueError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _read_line(connection: socket.socket, limit: int | None) -> bytes | None:
    """Return one line without its end; ``None`` if it is too long or does not end."""
    received = b""
    while not received.endswith(b"\n"):
        more = connection.recv(2**16)
        received += more
        if not more or (limit is not None and len(received) > limit):
            return None
    return received


def _user_of(connection: socket.socket) -> int:
    """Return the user at the other end. Source: unix(7), ``SO_PEERCRED``."""
    credentials = struct.Struct("3i")
    return credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[1]


@contextlib.contextmanager
def _connected(folder: str) -> Generator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(REQUEST_SECONDS)
        with _address(folder) as address:
            connection.connect(address)
        yield connection


@contextlib.contextmanager
def _address(folder: str) -> Generator[str]:
    """Yield an address of the socket, which may be at most 107 bytes long: a folder's path may be longer."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{_SOCKET}"
    finally:
        os.close(descriptor)
