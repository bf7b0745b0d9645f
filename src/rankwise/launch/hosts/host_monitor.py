# SPDX-License-Identifier: Apache-2.0
"""Monitors the hosts of a job to the end, and terminates those that would wait for others forever.

Starts nothing. Imported by ``ssh``.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from rankwise.launch.messages import EndJob, Refuse, SignalHost, error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.launch.hosts.ssh_sessions import SshSession, SshSessions

CONCLUDE_SECONDS = 20.0
"""How long the hosts may take to exit by themselves if the job cannot continue."""
LEAVE_SECONDS = 10.0
"""How long they may take once told to."""


class HostMonitor:
    """The state of the hosts, from the start of their ranks to the end of the last."""

    def __init__(self, sessions: SshSessions, min_nodes: int, show: Callable[[str], None]) -> None:
        self._sessions = sessions
        self._min_nodes = min_nodes
        self._show = show
        self._not_ended = list(sessions.all)
        self._refusal: Refuse | None = None
        self._deadline: float | None = None
        self._were_signalled = False
        self._signal: signal.Signals | None = None

    def follow(self) -> int:
        """Return the exit code of the job.

        Raises:
            ConfigurationError, LaunchError: a host's ranks could not be started; the others have been terminated.
        """
        while self._sessions.running:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            number = self._sessions.turn(left)
            if number is None and self._sessions.is_unread and self._signal is None:
                number = signal.SIGHUP
            if number is not None:
                self._pass_on(number)
            for session in [one for one in self._not_ended if one.exit_code is not None]:
                self._not_ended.remove(session)
                self._note_end(session)
            if self._deadline is not None and time.monotonic() >= self._deadline:
                if self._were_signalled:
                    break
                self._were_signalled = True
                self._sessions.send_all(SignalHost(signal=signal.SIGTERM.name))
                self._deadline = time.monotonic() + LEAVE_SECONDS
        return self._exit_code()

    def _pass_on(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR2:
            # The first host asks all ranks to save and stop.
            self._sessions.all[0].send(SignalHost(signal=number.name))
            return
        self._sessions.send_all(SignalHost(signal=number.name))
        self._end_within(CONCLUDE_SECONDS if self._signal is None else LEAVE_SECONDS)
        self._signal = number

    def _note_end(self, session: SshSession) -> None:
        name, last = session.host.name, session.message
        # Continues without any host but the first, as long as enough remain.
        continues = session is not self._sessions.all[0] and len(self._sessions.running) >= self._min_nodes
        if last is None and self._signal is None and not self._were_signalled:
            rest = "; the job continues without it" if continues else ""
            self._show(f"[rankwise] {name} was lost: its ssh exited with code {session.exit_code}{rest}\n")
        if isinstance(last, Refuse) and continues:
            self._show(f"[rankwise] {name} does not take part. {error_of(last)}\n")
        elif isinstance(last, Refuse):
            # The others would wait for it until their timeout.
            self._refusal = self._refusal or last
            self._end_within(0.0)
        elif not continues:
            self._end_within(CONCLUDE_SECONDS)

    def _end_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def _exit_code(self) -> int:
        if self._refusal is not None:
            raise error_of(self._refusal)
        ends = [one.message for one in self._sessions.all if isinstance(one.message, EndJob)]
        if ends and ends[0] is self._sessions.all[0].message:
            self._show(ends[0].what)
            return ends[0].exit_code
        if self._signal is not None:
            return 128 + self._signal
        return next((end.exit_code for end in ends if end.exit_code), 1)
