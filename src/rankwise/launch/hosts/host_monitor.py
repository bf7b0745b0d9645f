# SPDX-License-Identifier: Apache-2.0
"""Monitors the hosts of a job to the end, and ends those that would wait for others without end.

Starts nothing. Imported by ``ssh``.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from rankwise.launch.hosts.message_stream import error_of
from rankwise.launch.messages import HostEnded, HostRefused, Message, SignalHost

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.errors import ConfigurationError, LaunchError
    from rankwise.launch.hosts.ssh_sessions import SshSession, SshSessions

CONCLUDE_SECONDS = 20.0
"""How long the hosts have to end by themselves where the job cannot go on."""
LEAVE_SECONDS = 10.0
"""How long they have once they are told to."""


class HostMonitor:
    """What is known of the hosts, from the start of their ranks to the end of the last."""

    def __init__(self, sessions: SshSessions, min_nodes: int, show: Callable[[str], None]) -> None:
        self._sessions = sessions
        self._min_nodes = min_nodes
        self._show = show
        self._last: dict[int, Message] = {}
        """The last message of each host that has sent one."""
        self._ended: set[int] = set()
        self._refusal: ConfigurationError | LaunchError | None = None
        self._deadline: float | None = None
        self._were_signalled = False
        self._signal: signal.Signals | None = None

    def follow(self) -> int:
        """Return the exit code of the job.

        Raises:
            ConfigurationError, LaunchError: a host's ranks could not be started; the others have been ended.
        """
        while self._sessions.running:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            number = self._sessions.turn(left)
            if number is not None:
                self._pass_on(number)
            elif self._sessions.is_unread and self._signal is None:
                self._pass_on(signal.SIGHUP)
            self._note_ends()
            if self._deadline is not None and time.monotonic() >= self._deadline and not self._end():
                break
        return self._exit_code()

    def _pass_on(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR2:
            # The first host asks all ranks to save and stop.
            self._sessions.all[0].send(SignalHost(signal=number.name))
            return
        self._sessions.send_all(SignalHost(signal=number.name))
        self._end_within(CONCLUDE_SECONDS if self._signal is None else LEAVE_SECONDS)
        self._signal = number

    def _note_ends(self) -> None:
        for number, session in enumerate(self._sessions.all):
            if session.messages:
                self._last[number] = session.messages.popleft()
            if session.exit_code is not None and number not in self._ended:
                self._ended.add(number)
                self._note_end(number, session)

    def _note_end(self, number: int, session: SshSession) -> None:
        name, last = session.host.name, self._last.get(number)
        continues = self._can_continue_without(number)
        if last is None and self._signal is None and not self._were_signalled:
            rest = "; the job goes on without it" if continues else ""
            self._show(f"[rankwise] {name} is gone: its ssh has ended with exit code {session.exit_code}{rest}\n")
        if isinstance(last, HostRefused):
            error = error_of(last)
            if continues:
                self._show(f"[rankwise] {name} takes no part. {error}\n")
            else:
                # Nothing will come of the others' waiting.
                self._refusal = self._refusal or error
                self._end_within(0.0)
        elif not continues:
            self._end_within(CONCLUDE_SECONDS)

    def _can_continue_without(self, number: int) -> bool:
        """Return whether the job can go on when a host has ended: any but the first, as long as enough are left."""
        return number > 0 and len(self._sessions.running) >= self._min_nodes

    def _end_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def _end(self) -> bool:
        """Tell the hosts to end; return whether it is worth waiting for them."""
        if self._were_signalled:
            return False
        self._were_signalled = True
        self._sessions.send_all(SignalHost(signal=signal.SIGTERM.name))
        self._deadline = time.monotonic() + LEAVE_SECONDS
        return True

    def _exit_code(self) -> int:
        if self._refusal is not None:
            raise self._refusal
        first = self._last.get(0)
        if isinstance(first, HostEnded):
            self._show(first.report)
            return first.exit_code
        if self._signal is not None:
            return 128 + self._signal
        others = [last.exit_code for last in self._last.values() if isinstance(last, HostEnded)]
        return next((code for code in others if code), 1)
