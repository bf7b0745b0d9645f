# SPDX-License-Identifier: Apache-2.0
"""Commands that are forked from a process with torch in memory, where ``python -m`` would import it for each test.

A command has its own session or process group, streams, folder and environment, as one that is started afresh, and ends
as Python does; one for a host of tests/multihost enters that host. What differs: its command line in ``/proc``, what
Python and torch read of the environment when they start, and modules that are in memory already, which are not taken
apart at its end, nor by the destructors of their libraries. Tests of these start it by ``subprocess``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import importlib.util
import json
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

T = TypeVar("T", IO[str], socket.socket)

MARK = "RANKWISE_TEST_MARK"
"""A variable of 32 letters that every process of a command has in ``/proc/PID/environ``, whoever its parent is."""
NO_MARK = "0" * 32
READ_AT_START = ("PYTHON", "MKL_", "KMP_", "TORCH_", "LC_", "LANG", "PATH")
"""Starts of names of variables that are read before a command could be forked, and by what is started from it."""
LONGEST_MESSAGE_BYTES = 1 << 20
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
"""Source: Linux's include/uapi/linux/sched.h."""
_KEPT: set[int] = set()
_ENV_START = 47
"""Of the fields of ``/proc/PID/stat`` behind the command's name. Source: proc_pid_stat(5)."""


class WarmPython:
    """The process that commands are forked from."""

    def __init__(
        self, environment: Mapping[str, str], *, module: str = "preloaded", options: Sequence[str] = ()
    ) -> None:
        """Start it.

        Args:
            environment: variables that its commands have too, as far as they are read at the start.
            module: what it imports.
            options: of Python, which its commands have too.
        """
        self.environment = {**environment, MARK: NO_MARK}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *options, __file__, str(theirs.fileno()), module],
                env=self.environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._socket = ours

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Return whether a command with these variables would read the same at its start."""

        def read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
            return {name: value for name, value in variables.items() if name.startswith(READ_AT_START)}

        return read_at_start(environment) == read_at_start(self.environment)

    def start(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        session: bool = False,
        stdin: IO[str] | int = subprocess.DEVNULL,
        stdout: IO[str] | int | None = subprocess.PIPE,
        stderr: IO[str] | int | None = subprocess.PIPE,
        beside: int | None = None,
    ) -> Running:
        """Start ``python WORDS``.

        Args:
            words: ``-m MODULE``, ``-c CODE`` or a script, and arguments.
            folder: where it runs.
            environment: all of its variables, with a mark.
            session: whether it gets a session of its own.
            stdin: as :class:`subprocess.Popen` takes it.
            stdout: as :class:`subprocess.Popen` takes it.
            stderr: as :class:`subprocess.Popen` takes it, ``STDOUT`` too.
            beside: the number of a process whose network, host name and mounts it is to have, rather than ours.
        """
        request = {
            "words": list(words),
            "folder": str(folder),
            "environment": dict(environment),
            "session": session,
            "beside": beside,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as sent:
            put, put_from = _input(stdin, sent)
            out, out_to = _stream(stdout, 1, sent)
            err, err_to = (None, out_to) if stderr == subprocess.STDOUT else _stream(stderr, 2, sent)
            streams = [put_from, out_to, err_to]
            socket.send_fds(self._socket, [json.dumps(request).encode()], [*streams, theirs.fileno()])
        return Running(ours, put, out, err, ["python", *words])

    def run(self, words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        """Run ``python WORDS`` to its end, with the variables that the process itself was started with."""
        with self.start(words, folder, self.environment) as running:
            stdout, stderr = running.communicate(timeout=80)
        return subprocess.CompletedProcess(running.args, running.wait(), stdout, stderr)

    def close(self) -> None:
        """End the process; commands that still run continue."""
        self._socket.close()
        self._process.kill()  # On a busy machine it may still be importing.
        self._process.wait()


def variables() -> dict[str, str]:
    """Return this process's environment, for commands: none of how many threads, and this rankwise."""
    chosen = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONUNBUFFERED"}
    own = {name: value for name, value in os.environ.items() if name not in chosen}
    # As where .venv is active; scripts' own commands start `python`.
    own["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), own["PATH"]])
    # Wherever this rankwise came from, with PYTHONPATH perhaps relative to another folder.
    spec = importlib.util.find_spec("rankwise")
    assert spec is not None
    assert spec.origin is not None
    own["PYTHONPATH"] = str(Path(spec.origin).parents[1])
    return own


def _stream(wanted: IO[str] | int | None, own: int, sent: contextlib.ExitStack) -> tuple[IO[str] | None, int]:
    """Return what to read a command's stream from, if that is a pipe, and the descriptor that it writes to."""
    if wanted is None:
        return None, own
    if wanted == subprocess.PIPE:
        reader, writer = os.pipe()
        sent.callback(os.close, writer)
        return os.fdopen(reader, encoding="utf-8"), writer
    return None, wanted if isinstance(wanted, int) else wanted.fileno()


def _input(wanted: IO[str] | int, sent: contextlib.ExitStack) -> tuple[IO[str] | None, int]:
    """Return what to write a command's stdin to, if that is a pipe, and the descriptor that it reads."""
    if wanted == subprocess.PIPE:
        reader, writer = os.pipe()
        sent.callback(os.close, reader)
        return os.fdopen(writer, "w", encoding="utf-8"), reader
    if wanted == subprocess.DEVNULL:
        nothing = os.open(os.devnull, os.O_RDONLY)
        sent.callback(os.close, nothing)
        return None, nothing
    return None, wanted if isinstance(wanted, int) else wanted.fileno()


def _readable(ones: Iterable[T], timeout: float | None) -> list[T]:
    """Return those that can be read without waiting, once one can; ``select.select`` refuses descriptors above 1023."""
    numbered = {one.fileno(): one for one in ones}
    polled = select.poll()
    for number in numbered:
        polled.register(number, select.POLLIN)
    return [numbered[number] for number, _ in polled.poll(None if timeout is None else math.ceil(timeout * 1000))]


class Running:
    """A command that runs: what :class:`subprocess.Popen` offers of it, as far as tests need that."""

    def __init__(
        self,
        ending: socket.socket,
        stdin: IO[str] | None,
        stdout: IO[str] | None,
        stderr: IO[str] | None,
        words: list[str],
    ) -> None:
        self.args = words
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: int | None = None
        self._ending = ending
        self.pid = int(ending.recv(20))

    def poll(self) -> int | None:
        """Return the exit code, if it has ended."""
        if self.returncode is None and _readable([self._ending], 0):
            self.returncode = int(self._ending.recv(20))
            self._ending.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended."""
        if self.returncode is None and not _readable([self._ending], timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:  # noqa: A002 - as Popen has it
        """Return everything it has written, and has not been read yet, once it has ended.

        What it is to read goes into its stdin first, which then ends; a pipe holds 64 KiB.
        """
        if self.stdin is not None:
            with self.stdin:
                self.stdin.write(input or "")
        deadline = None if timeout is None else time.monotonic() + timeout
        found: dict[IO[str] | None, list[bytes]] = {self.stdout: [], self.stderr: []}
        open_ones = {stream for stream in found if stream is not None and not stream.closed}
        while open_ones:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            readable = _readable(open_ones, left)
            if not readable:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            for one in readable:
                text = os.read(one.fileno(), 1 << 16)
                found[one].append(text)
                if not text:
                    open_ones.discard(one)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self.close()
        return b"".join(found[self.stdout]).decode(), b"".join(found[self.stderr]).decode()

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close its streams."""
        for stream in self.stdin, self.stdout, self.stderr:
            if stream is not None:
                stream.close()
        self._ending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # To wait for a command that a failed test has not ended would hide why it failed.
            self.kill()
        self.wait()
        self.close()


Started = subprocess.Popen[str] | Running


# -- in the process itself -------------------------------------------------------------------------


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork a command for each request and report its end. Returns in each fork, and after the last request."""
    running: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != requests.fileno():
                pid, ending = running.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                _report(ending, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                ending.close()
                continue
            text, streams, _, _ = socket.recv_fds(requests, LONGEST_MESSAGE_BYTES, 4)
            if not text:
                return None
            pid = os.fork()
            if pid == 0:
                for number in range(3):
                    os.dup2(streams[number], number)
                requests.detach()
                for _, ending in running.values():
                    ending.detach()
                os.closerange(3, os.sysconf("SC_OPEN_MAX"))
                return json.loads(text)
            for number in range(3):
                os.close(streams[number])
            ending = socket.socket(fileno=streams[3])
            _report(ending, pid)
            running[os.pidfd_open(pid)] = pid, ending
            poll.register(max(running), select.POLLIN)


def _report(ending: socket.socket, number: int) -> None:
    # The test may have lost interest.
    with contextlib.suppress(OSError):
        ending.send(b"%d" % number)


def _become(request: dict[str, Any]) -> None:
    """Make this fork a process that Python would have been started in."""
    import numpy as np
    import torch

    if request["session"]:
        os.setsid()
    if request["beside"] is not None:
        _enter_namespaces(request["beside"])
    os.chdir(request["folder"])
    _write_mark(request["environment"].get(MARK, NO_MARK))
    os.environ.clear()
    os.environ.update(request["environment"])
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    time.tzset()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
    tempfile.tempdir = None
    # Python draws anew in a fork by itself.
    np.random.seed()  # noqa: NPY002 - what scripts draw from


def _enter_namespaces(number: int) -> None:
    """Enter the network, host name and mounts of another process."""
    process = os.pidfd_open(number)
    if ctypes.CDLL(None, use_errno=True).setns(process, CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(process)


def _run(words: list[str]) -> None:
    """Run what ``python WORDS`` would."""
    if words[0] == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = ["", *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec")
    else:
        sys.path[0] = str(Path(words[0]).resolve().parent)
        sys.argv = list(words)
        main.__file__ = str(Path(words[0]).absolute())
        code = compile(Path(words[0]).read_bytes(), main.__file__, "exec")
    exec(code, main.__dict__)  # noqa: S102 - the command itself


def _write_mark(mark: str) -> None:
    """Write the mark where ``/proc/PID/environ`` reads: the variables that the process was started with."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = map(int, fields[_ENV_START : _ENV_START + 2])
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        place = memory.read(end - start).index(f"{MARK}=".encode()) + len(MARK) + 1
        memory.seek(start + place)
        memory.write(mark.encode())


def _keep_modules() -> None:
    """Leave out of Python's end what was in memory before the fork: taking it apart costs a third of a second."""
    ctypes.CDLL(None).fflush(None)
    for name, module in list(sys.modules.items()):
        if name not in {"__main__", "builtins", "sys"} and id(module) in _KEPT:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            del sys.modules[name]


def _main() -> None:
    # Before what is imported registers there: it is the last to run.
    atexit.register(_keep_modules)
    importlib.import_module(sys.argv[2])
    _KEPT.update(map(id, sys.modules.values()))
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        _become(request)
        _run(request["words"])


if __name__ == "__main__":
    _main()
