# SPDX-License-Identifier: Apache-2.0
"""The ssh connections of a job: what each host says, and what its ranks write, on its way to the person.

Carries and shows; decides nothing. Imported by ``ssh``.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections import deque
from typing import TYPE_CHECKING, Self

from rankwise.launch.output import IDLE_SECONDS, LONGEST_LINE_BYTES, STDERR, STDOUT, Terminal
from rankwise.launch.part import Message, Unmarking, line

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence

    from rankwise.launch.hosts import Host
    from rankwise.launch.interrupts import Interrupts

LEAVE_SECONDS = 5.0
"""How long a host has to leave once its stdin is closed."""
EARLY_BYTES = 1 << 14
"""How much is kept of what comes before a host's first word: what its shell says, and ssh."""


class _Lines:
    """One stream of one host: shown by whole lines, and what stays unfinished after a moment."""

    def __init__(self, terminal: Terminal) -> None:
        self.pending = b""
        self._terminal = terminal
        self._since = 0.0

    def take(self, data: bytes) -> None:
        self.pending += data
        self._since = time.monotonic()
        end = max(self.pending.rfind(b"\n"), self.pending.rfind(b"\r")) + 1
        self._show(end if len(self.pending) - end < LONGEST_LINE_BYTES else len(self.pending))

    def show_rest(self, *, after_seconds: float = 0.0) -> None:
        if time.monotonic() - self._since >= after_seconds:
            self._show(len(self.pending))

    def _show(self, num_bytes: int) -> None:
        shown, self.pending = self.pending[:num_bytes], self.pending[num_bytes:]
        if shown and not self._terminal.is_gone:
            self._terminal.write(shown, self, ends_line=shown.endswith(b"\n"))


class Connection:
    """The ssh process that leads to one host."""

    def __init__(self, host: Host, argv: Sequence[str], token: str, terminals: dict[int, Terminal]) -> None:
        self.host = host
        self.messages: deque[Message] = deque()
        """What the host has said and nobody has taken yet."""
        self.early = b""
        """What came before the host's part began, and was not shown."""
        self.is_shown = False
        """Whether what comes is shown."""
        self.has_answered = False
        """Whether the host has said anything at all."""
        self.exit_code: int | None = None
        self._unmarking = Unmarking(token)
        self._lines = {number: _Lines(terminal) for number, terminal in terminals.items()}
        self.process = subprocess.Popen(  # noqa: S603 - ssh, or what the person has named in its place
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C comes to this process alone, which passes it on.
            start_new_session=True,
        )

    def send(self, message: Message) -> None:
        """Tell the host something; nothing happens where it is gone."""
        stdin = self.process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError):
                stdin.write(line(message))
                stdin.flush()

    def hang_up(self) -> None:
        """Let the host end its part by itself."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def read(self, number: int, data: bytes) -> None:
        """Take in what has come through stdout or stderr."""
        if number == STDOUT:
            data, messages = self._unmarking.take(data)
            self.messages += messages
            self.has_answered = self.has_answered or bool(messages)
        if self.is_shown:
            self._lines[number].take(data)
        else:
            self.early = (self.early + data)[-EARLY_BYTES:]

    def show_rest(self, *, after_seconds: float = 0.0) -> bool:
        """Show unfinished lines that are old enough; return whether some still wait."""
        for lines in self._lines.values():
            lines.show_rest(after_seconds=after_seconds)
        return any(lines.pending for lines in self._lines.values())


class Connections:
    """All of them, from the first to the end of the last; leaving the block ends what is left."""

    def __init__(self, token: str, interrupts: Interrupts) -> None:
        self.all: list[Connection] = []
        self._token = token
        self._interrupts = interrupts
        self._terminals = {STDOUT: Terminal(STDOUT), STDERR: Terminal(STDERR)}
        self._selector = selectors.DefaultSelector()
        self._selector.register(interrupts.fileno(), selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def running(self) -> list[Connection]:
        """Those that have not ended."""
        return [one for one in self.all if one.exit_code is None]

    @property
    def is_unread(self) -> bool:
        """Whether nobody reads this process's stdout or stderr any more."""
        return any(terminal.is_gone for terminal in self._terminals.values())

    def open(self, host: Host, argv: Sequence[str]) -> None:
        """Start the way to one more host.

        Raises:
            OSError: there is no such command.
        """
        connection = Connection(host, argv, self._token, self._terminals)
        self.all.append(connection)
        for number, pipe in ((STDOUT, connection.process.stdout), (STDERR, connection.process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, (connection, number))
        ending = os.pidfd_open(connection.process.pid)
        self._selector.register(ending, selectors.EVENT_READ, (connection, 0))

    def send_all(self, message: Message) -> None:
        """Tell every host that has not ended."""
        for connection in self.running:
            connection.send(message)

    def turn(self, timeout_seconds: float | None) -> signal.Signals | None:
        """Take in what comes next, waiting for it at most so long; return a signal where one has come."""
        unfinished = [one for one in self.all if one.show_rest(after_seconds=IDLE_SECONDS)]
        if unfinished:
            timeout_seconds = IDLE_SECONDS if timeout_seconds is None else min(IDLE_SECONDS, timeout_seconds)
        number = None
        for key, _ in self._selector.select(timeout_seconds):
            if key.fd == self._interrupts.fileno():
                number = self._interrupts.take()
                continue
            connection, stream = key.data
            # It may have ended earlier in this turn.
            if connection.exit_code is None:
                if stream:
                    self._read(connection, stream, key.fd)
                else:
                    self._end(connection, key.fd)
        return number

    def _read(self, connection: Connection, stream: int, descriptor: int) -> None:
        """Read until there is nothing more for now."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(descriptor, 1 << 16):
                connection.read(stream, data)
            self._selector.unregister(descriptor)

    def _end(self, connection: Connection, ending: int) -> None:
        """Take in the last of what an ended ssh process has written; others may hold its pipes open for long."""
        own = [key for key in self._selector.get_map().values() if key.data and key.data[0] is connection]
        for key in own:
            if key.data[1]:
                self._read(connection, key.data[1], key.fd)
        for key in own:
            if key.fd in self._selector.get_map():
                self._selector.unregister(key.fd)
        os.close(ending)
        connection.show_rest()
        connection.exit_code = connection.process.wait()
        for pipe in (connection.process.stdin, connection.process.stdout, connection.process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _close(self) -> None:
        """End the parts of all hosts, and the connections."""
        for connection in self.running:
            connection.hang_up()
            if not connection.has_answered:
                # Perhaps on its way to a host that never answers.
                connection.process.terminate()
        deadline = time.monotonic() + LEAVE_SECONDS
        while self.running and (left := deadline - time.monotonic()) > 0:
            self.turn(left)
        for connection in self.running:
            connection.process.kill()
        while self.running:
            self.turn(None)
        self._selector.close()
