# SPDX-License-Identifier: Apache-2.0
"""The ssh connections of a job: forwards each host's messages, and the output of its ranks to the user.

Messages are lines of JSON on the host's stdin and stdout. A host's messages share its stdout with the output of its
ranks, and follow a mark that no rank knows. Decides nothing. Imported by ``ssh`` and, for the form of messages, by
``remote``.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import time
from collections import deque
from typing import IO, TYPE_CHECKING, Self, cast

from rankwise.launch.agent.output import LINE_WAIT_SECONDS, STDERR, STDOUT, TAIL_LINES, Lines, Terminal
from rankwise.launch.messages import Message, MessageError, decode, encode

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence

    from rankwise.launch.agent.signals import PendingSignals
    from rankwise.launch.hosts.host_list import Host

SESSION_EXIT_SECONDS = 5.0
"""How long a host may take to exit once its stdin is closed."""


def mark(token: str) -> bytes:
    """Return the prefix of each message of a host; ``token`` was generated for this job."""
    return f"\x1erankwise {token} ".encode()


def line(message: Message) -> bytes:
    """Return a message as one line."""
    return encode(message) + b"\n"


class MessageExtractor:
    """Splits the stdout of a host into its messages and the output of its ranks."""

    def __init__(self, token: str, host: str) -> None:
        """Take the token of the job, and the name of the host for errors."""
        self._host = host
        self._mark = mark(token)
        self._message = re.compile(re.escape(self._mark) + rb"([^\n]*)\n")
        self._held = b""

    def split(self, data: bytes) -> tuple[bytes, list[Message]]:
        """Return the output of the ranks in ``data`` and in data held back before, and the messages in it.

        Raises:
            MessageError: the text after a mark is not a message.
        """
        # Output and messages alternate.
        *parts, output = self._message.split(self._held + data)
        # No message contains the mark's first byte.
        _, begun, rest = output.rpartition(self._mark[:1])
        tail = begun + rest
        self._held = tail if begun and (tail.startswith(self._mark) or self._mark.startswith(tail)) else b""
        shown = b"".join(parts[::2]) + output[: len(output) - len(self._held)]
        return shown, [decode(text, self._host) for text in parts[1::2]]


class SshSession:
    """The ssh process that is connected to one host."""

    def __init__(self, host: Host, argv: Sequence[str], token: str, terminals: dict[int, Terminal]) -> None:
        self.host = host
        self.message: Message | None = None
        """The last message of the host: it waits for the answer to each before it sends another."""
        self.early: deque[bytes] = deque(maxlen=TAIL_LINES)
        """The last lines before the host's ranks start, which are not shown: from its shell, and from ssh."""
        self.has_answered = False
        """Whether the host has sent anything at all."""
        self.exit_code: int | None = None
        self._extractor = MessageExtractor(token, host.name)
        self._terminals = terminals
        self._lines = {number: Lines(terminal=None, tail=self.early) for number in terminals}
        self.process = subprocess.Popen(  # noqa: S603 - ssh, or what the person has named in its place
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C reaches this process only, which forwards it.
            start_new_session=True,
        )
        pipes = (self.process.stdin, self.process.stdout, self.process.stderr)
        self._stdin, stdout, stderr = (cast("IO[bytes]", pipe) for pipe in pipes)
        self._streams = {stdout.fileno(): STDOUT, stderr.fileno(): STDERR}
        for source in self._streams:
            os.set_blocking(source, False)
        self._ending = os.pidfd_open(self.process.pid)

    @property
    def sources(self) -> list[int]:
        """The descriptors that are readable when there is something to :meth:`read`."""
        return [*self._streams, self._ending]

    def send(self, message: Message) -> None:
        """Send the host a message; does nothing if it has exited."""
        with contextlib.suppress(OSError, ValueError):
            self._stdin.write(line(message))
            self._stdin.flush()

    def pop_message(self) -> Message | None:
        """Return the message that the host waits for the answer to."""
        taken, self.message = self.message, None
        return taken

    def hang_up(self) -> None:
        """Let the host exit by itself."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def read(self, source: int) -> None:
        """Read the available data; does nothing if the session has ended."""
        if self.exit_code is not None:
            return
        if source == self._ending:
            self._end()
        # Once: a host that writes endlessly must not block signals and other hosts.
        elif not self._read(source):
            del self._streams[source]

    def show(self) -> None:
        """Show the output from now on."""
        self.show_rest()
        self._lines = {number: Lines(terminal=terminal) for number, terminal in self._terminals.items()}

    def show_rest(self, *, after_seconds: float = 0.0) -> bool:
        """Show unfinished lines that are old enough; return whether some still wait."""
        for lines in self._lines.values():
            lines.show_rest(after_seconds=after_seconds)
        return any(lines.pending for lines in self._lines.values())

    def _end(self) -> None:
        # Only what is available: other processes may keep the pipes of an exited ssh process open.
        for source in self._streams:
            while self._read(source):
                pass
        self.show_rest()
        os.close(self._ending)
        with contextlib.suppress(OSError), self.process:
            pass
        self.exit_code = self.process.returncode

    def _read(self, source: int) -> bool:
        """Read the available stdout or stderr; return whether there was any."""
        try:
            data = os.read(source, 1 << 16)
        except BlockingIOError:
            return False
        number, has_data = self._streams[source], bool(data)
        if number == STDOUT:
            data, messages = self._extractor.split(data)
            if messages:
                self.message, self.has_answered = messages[-1], True
        self._lines[number].add(data)
        return has_data


class SshSessions:
    """All sessions, from the first to the end of the last; leaving the block ends the remaining ones."""

    def __init__(self, token: str, signals: PendingSignals) -> None:
        self.all: list[SshSession] = []
        self._token = token
        self._signals = signals
        self._terminals = {STDOUT: Terminal(STDOUT), STDERR: Terminal(STDERR)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the parts of all hosts, and the connections."""
        for session in self.running:
            session.hang_up()
            if not session.has_answered:
                # It may be connecting to a host that never answers.
                session.process.terminate()
        deadline = time.monotonic() + SESSION_EXIT_SECONDS
        while self.running:
            left = deadline - time.monotonic()
            if left <= 0:
                for session in self.running:
                    session.process.kill()
            # An invalid message no longer matters.
            with contextlib.suppress(MessageError):
                self.turn(left if left > 0 else None)

    @property
    def running(self) -> list[SshSession]:
        """The sessions that have not ended."""
        return [one for one in self.all if one.exit_code is None]

    @property
    def is_unread(self) -> bool:
        """Whether this process's stdout or stderr is no longer read."""
        return any(terminal.is_gone for terminal in self._terminals.values())

    def open(self, host: Host, argv: Sequence[str]) -> None:
        """Start the session of one more host.

        Raises:
            OSError: there is no such command.
        """
        self.all.append(SshSession(host, argv, self._token, self._terminals))

    def send_all(self, message: Message) -> None:
        """Send a message to every host that has not exited."""
        for session in self.running:
            session.send(message)

    def turn(self, timeout_seconds: float | None) -> signal.Signals | None:
        """Handle the next input, waiting for at most ``timeout_seconds``; return a signal if one was received.

        Raises:
            MessageError: a host has sent an invalid message.
        """
        unfinished = [one for one in self.all if one.show_rest(after_seconds=LINE_WAIT_SECONDS)]
        if unfinished:
            timeout_seconds = LINE_WAIT_SECONDS if timeout_seconds is None else min(LINE_WAIT_SECONDS, timeout_seconds)
        sessions = {source: one for one in self.running for source in one.sources}
        poll = select.poll()
        for source in (self._signals.fileno(), *sessions):
            poll.register(source, select.POLLIN)
        number = None
        for source, _ in poll.poll(None if timeout_seconds is None else timeout_seconds * 1000):
            if source in sessions:
                sessions[source].read(source)
            else:
                number = self._signals.next_received()
        return number
