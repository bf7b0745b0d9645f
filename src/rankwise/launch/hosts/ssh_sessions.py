# SPDX-License-Identifier: Apache-2.0
"""The ssh connections of a job: what each host sends, and what its ranks write, on its way to the person.

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

from rankwise.launch.agent.output import IDLE_SECONDS, LONGEST_LINE_BYTES, STDERR, STDOUT, Terminal
from rankwise.launch.hosts.message_stream import MessageExtractor, line
from rankwise.launch.messages import MessageError, StartHost

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence

    from rankwise.launch.agent.signals import PendingSignals
    from rankwise.launch.hosts.host_list import Host
    from rankwise.launch.messages import Message, ToHost

LEAVE_SECONDS = 5.0
"""How long a host has to leave once its stdin is closed."""
EARLY_BYTES = 1 << 14
"""How much is kept of what comes before a host's first message: what its shell writes, and ssh."""


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


class SshSession:
    """The ssh process that leads to one host."""

    def __init__(self, host: Host, argv: Sequence[str], token: str, terminals: dict[int, Terminal]) -> None:
        self.host = host
        self.messages: deque[Message] = deque()
        """What the host has sent and nothing has taken yet."""
        self.early = b""
        """What came before the host's part began, and was not shown."""
        self.is_shown = False
        """Whether what comes is shown."""
        self.has_answered = False
        """Whether the host has sent anything at all."""
        self.exit_code: int | None = None
        self._extractor = MessageExtractor(token, host.name)
        self._lines = {number: _Lines(terminal) for number, terminal in terminals.items()}
        self.process = subprocess.Popen(  # noqa: S603 - ssh, or what the person has named in its place
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C comes to this process alone, which passes it on.
            start_new_session=True,
        )

    def send(self, message: ToHost) -> None:
        """Send the host a message; nothing happens where it has ended."""
        stdin = self.process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError):
                stdin.write(line(message))
                stdin.flush()

    def start(self, rendezvous: tuple[str, int] | None) -> None:
        """Have the host start its ranks, and show what they write."""
        self.is_shown = True
        self.send(StartHost(rendezvous=rendezvous))

    def hang_up(self) -> None:
        """Let the host end its part by itself."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def read(self, number: int, data: bytes) -> None:
        """Take in what has come through stdout or stderr."""
        if number == STDOUT:
            data, messages = self._extractor.take(data)
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


class SshSessions:
    """All of them, from the first to the end of the last; leaving the block ends what is left."""

    def __init__(self, token: str, signals: PendingSignals) -> None:
        self.all: list[SshSession] = []
        self._token = token
        self._signals = signals
        self._terminals = {STDOUT: Terminal(STDOUT), STDERR: Terminal(STDERR)}
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.fileno(), selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def running(self) -> list[SshSession]:
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
        session = SshSession(host, argv, self._token, self._terminals)
        self.all.append(session)
        for number, pipe in ((STDOUT, session.process.stdout), (STDERR, session.process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, (session, number))
        ending = os.pidfd_open(session.process.pid)
        self._selector.register(ending, selectors.EVENT_READ, (session, 0))

    def send_all(self, message: ToHost) -> None:
        """Send a message to every host that has not ended."""
        for session in self.running:
            session.send(message)

    def turn(self, timeout_seconds: float | None) -> signal.Signals | None:
        """Take in what comes next, waiting for it at most so long; return a signal where one has come."""
        unfinished = [one for one in self.all if one.show_rest(after_seconds=IDLE_SECONDS)]
        if unfinished:
            timeout_seconds = IDLE_SECONDS if timeout_seconds is None else min(IDLE_SECONDS, timeout_seconds)
        number = None
        for key, _ in self._selector.select(timeout_seconds):
            if key.fd == self._signals.fileno():
                number = self._signals.take()
                continue
            session, stream = key.data
            # It may have ended earlier in this turn.
            if session.exit_code is None:
                if stream:
                    self._read(session, stream, key.fd)
                else:
                    self._end(session, key.fd)
        return number

    def _read(self, session: SshSession, stream: int, descriptor: int) -> None:
        """Read until there is nothing more for now."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(descriptor, 1 << 16):
                session.read(stream, data)
            self._selector.unregister(descriptor)

    def _end(self, session: SshSession, ending: int) -> None:
        """Take in the last of what an ended ssh process has written; others may hold its pipes open for long."""
        own = [key for key in self._selector.get_map().values() if key.data and key.data[0] is session]
        for key in own:
            if key.data[1]:
                self._read(session, key.data[1], key.fd)
        for key in own:
            if key.fd in self._selector.get_map():
                self._selector.unregister(key.fd)
        os.close(ending)
        session.show_rest()
        session.exit_code = session.process.wait()
        for pipe in (session.process.stdin, session.process.stdout, session.process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _drain(self, timeout_seconds: float | None) -> None:
        """Take in what comes while the sessions end; what a host sends wrongly ends nothing any more."""
        with contextlib.suppress(MessageError):
            self.turn(timeout_seconds)

    def _close(self) -> None:
        """End the parts of all hosts, and the connections."""
        for session in self.running:
            session.hang_up()
            if not session.has_answered:
                # Perhaps on its way to a host that never answers.
                session.process.terminate()
        deadline = time.monotonic() + LEAVE_SECONDS
        while self.running and (left := deadline - time.monotonic()) > 0:
            self._drain(left)
        for session in self.running:
            session.process.kill()
        while self.running:
            self._drain(None)
        self._selector.close()
