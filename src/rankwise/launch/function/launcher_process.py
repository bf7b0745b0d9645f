# SPDX-License-Identifier: Apache-2.0
"""The process between a caller of ``rankwise.launch`` and its ranks, as ``rankwise run`` is for a shell.

The caller is never forked: it may have threads and devices, and may be a notebook. The kernel kills the
launcher when its caller exits, and the fork server kills the ranks when the launcher exits. Imported by the launch of
a function, and by the process itself.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import gc
import importlib
import io
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from typing import IO, TYPE_CHECKING, Self, TextIO

from rankwise.launch.fork_server.entrypoint import find_target
from rankwise.launch.function.call import CallerMessage, Function, dump, raised, receive, send

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from rankwise.launch.report.failure import FailedAttempt, Failure

LAST_WORDS_SECONDS = 5.0
"""How long processes started by a launcher may outlive it."""

# The path is set before the first import that a file in the working directory could shadow.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from rankwise.launch.function.launcher_process import main; sys.exit(main(*map(int, sys.argv[1:3])))"
)


class LauncherProcess:
    """The caller's end: starts the process, sends it the call, shows its output. Leaving the block ends everything."""

    def __init__(self) -> None:
        """Start the process, which starts importing torch at once."""
        self.messages: list[CallerMessage] = []
        self.exit_code: int | None = None
        self._shown: dict[int, tuple[TextIO, codecs.IncrementalDecoder]] = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifeline, writer = os.pipe()
        self._lifeline = open(writer, "wb", buffering=0)  # noqa: SIM115, PTH123 - closed with the process
        streams = (sys.stdout, sys.stderr)
        inherited = [_descriptor(stream) for stream in streams]
        # subprocess knows Python's command-line options; multiprocessing takes them from there.
        flags: list[str] = vars(subprocess)["_args_from_interpreter_flags"]()
        words = [str(theirs.fileno()), str(lifeline), *map(str, sys.path)]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this very Python
                [sys.executable, *flags, "-c", _PROGRAM, *words],
                stdin=subprocess.DEVNULL,
                stdout=inherited[0],
                stderr=inherited[1],
                pass_fds=[theirs.fileno(), lifeline],
                # Ctrl-C reaches the caller only, which forwards it.
                start_new_session=True,
            )
        except BaseException:
            self._socket.close()
            self._lifeline.close()
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        for stream, pipe in zip(streams, (self._process.stdout, self._process.stderr), strict=True):
            if pipe is not None:
                self._shown[pipe.fileno()] = (stream, codecs.getincrementaldecoder("utf-8")("replace"))

    def __enter__(self) -> Self:
        return self

    def give(self, file: IO[bytes]) -> None:
        """Send the file that :func:`rankwise.launch.function.call.write` wrote."""
        # A process that has already exited has sent the reason in its messages.
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            send(self._socket, {}, file)

    def wait(self, seconds: float | None = None) -> None:
        """Show the output of the ranks until all have exited, and keep their messages."""
        pidfd = os.pidfd_open(self._process.pid)
        deadline = None if seconds is None else time.monotonic() + seconds
        with selectors.DefaultSelector() as selector, os.fdopen(pidfd) as ending:
            for source in (self._socket, ending, *self._shown):
                selector.register(source, selectors.EVENT_READ)
            # The socket is closed when the launcher, the server and every rank have exited.
            while selector.get_map():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                for key, _ in selector.select(left):
                    if key.fileobj is ending:
                        selector.unregister(ending)
                        deadline = time.monotonic() + LAST_WORDS_SECONDS
                    elif not (self._receive() if key.fileobj is self._socket else self._show(key.fd)):
                        selector.unregister(key.fileobj)
        self.exit_code = self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send the launcher a signal, if it is running a call."""
        if self.messages:
            self._process.send_signal(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, KeyboardInterrupt) and self.messages:
                # The ranks may clean up; a second Ctrl-C ends this.
                self.signal(signal.SIGINT)
                self.wait()
        finally:
            self._close()

    def _close(self) -> None:
        for message in self.messages:
            message.close()
        self._lifeline.close()
        if self._process.poll() is None:
            self._process.kill()
            self._wait_until_all_are_gone()
        self._process.wait()
        self._socket.close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _wait_until_all_are_gone(self) -> None:
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            message = receive(self._socket)
            if message is None:
                return
            message.close()

    def _receive(self) -> bool:
        message = receive(self._socket)
        if message is not None:
            self.messages.append(message)
        return message is not None

    def _show(self, descriptor: int) -> bool:
        stream, decoder = self._shown[descriptor]
        data = os.read(descriptor, 1 << 16)
        text = decoder.decode(data, final=not data)
        if text:
            stream.write(text)
            stream.flush()
        return bool(data)


def _descriptor(stream: TextIO | None) -> int:
    """Return the stdout or stderr for a process that writes to ``stream``: its file, a pipe, or nothing."""
    if stream is None:
        return subprocess.DEVNULL
    stream.flush()
    # Other streams have a descriptor too, but of another file: a notebook's is the server's terminal.
    if isinstance(stream, io.TextIOWrapper):
        with contextlib.suppress(OSError):
            return stream.fileno()
    return subprocess.PIPE


# -- the process itself --------------------------------------------------------------------------------


def main(caller_descriptor: int, lifeline: int) -> int:
    """Run as the launcher: run the call that the caller sends, and return the exit code.

    A rank also returns through here, as :func:`rankwise.launch.fork_server.fork_server.fork_server` describes.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end_with(lifeline)
    os.set_inheritable(caller_descriptor, False)
    caller = socket.socket(fileno=caller_descriptor)
    send(caller, {"kind": "ready"})
    gc.disable()  # as launch() does, which is called later here
    # While the caller is still pickling.
    importlib.import_module("torch")
    importlib.import_module("cloudpickle")
    from rankwise.launch.start import launch  # noqa: PLC0415 - all of it after torch has begun

    message = receive(caller)
    if message is None or message.body is None:
        return 1
    function = Function(message.body, caller)
    reporter = CallerReporter()
    own_pid = os.getpid()
    try:
        command = function.context.command
        target = (
            function if command is None else find_target(command.target, command.arguments, is_module=command.is_module)
        )
        exit_code = launch(target, function.context.options, reporter)
    except Exception as error:
        if os.getpid() != own_pid:
            raise  # in a rank, which returned through here
        with tempfile.TemporaryFile(prefix="rankwise-") as file:
            dump(raised(error, traceback.format_exc()), file)
            send(caller, {"kind": "refused"}, file)
        return 1
    with tempfile.TemporaryFile(prefix="rankwise-") as file:
        dump((reporter.last_report, reporter.failed), file)
        send(caller, {"kind": "ended", "exit_code": exit_code, "blamed": reporter.blamed}, file)
    # Every rank has exited and everything is sent: Python's own shutdown would only keep the caller waiting.
    os._exit(exit_code)


def _end_with(lifeline: int) -> None:
    """Have the kernel kill this process when the caller closes the other end, however it exits.

    Source: fcntl(2), F_SETSIG. A parent-death signal would follow the thread that called, not its process.
    """
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    # If it was closed before, there is no signal.
    if select.select([lifeline], [], [], 0)[0]:
        os._exit(1)


class CallerReporter:
    """Shows the launcher's output, except the final report of a failure: the caller raises that."""

    def __init__(self) -> None:
        self.last_report = ""
        self.blamed: tuple[int, str] | None = None
        """The first rank to fail in the last attempt, and how."""
        self.failed: dict[int, str] = {}
        """How ranks of this machine failed in the last attempt, as text."""

    def show(self, text: str) -> None:
        """Show ``text``, after any report that was not final."""
        sys.stderr.write(self.last_report + text)
        sys.stderr.flush()
        self.last_report, self.blamed = "", None

    def report(self, failed: FailedAttempt, text: str) -> None:
        """Keep the text of a failure, and the rank that caused it."""
        self.last_report = text
        self.blamed = failed.first.rank, failed.first.words

    def end(self, failures: Mapping[int, Failure]) -> None:
        """Keep how ranks failed: the caller has no value of those that the others continued without."""
        self.failed = {rank: one.words for rank, one in failures.items()}
