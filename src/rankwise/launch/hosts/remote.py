# SPDX-License-Identifier: Apache-2.0
"""One host's end of a job started over ssh: receives what to run on stdin, launches it, and ends with its caller.

Two processes: the host's launcher, and one that sends it the caller's signals. Started by ``ssh`` through a shell of
the host, and imported by nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from rankwise.errors import ConfigurationError, RankwiseError
from rankwise.launch.agent.signals import HANDLED, end_quietly
from rankwise.launch.fork_server import descendants
from rankwise.launch.fork_server.entrypoint import find_module, find_script
from rankwise.launch.hosts.message_stream import line, mark
from rankwise.launch.messages import EndJob, HostHere, HostSpec, Message, Ready, SignalHost, decode, refusal
from rankwise.launch.rendezvous import LOOPBACK, JobAddress, listen_towards
from rankwise.launch.report.reporter import TerminalReporter
from rankwise.launch.start import launch
from rankwise.version import VERSION
from rankwise.world import network
from rankwise.world.environments.reading import SECRET_NAME

if TYPE_CHECKING:
    from typing import NoReturn

    from rankwise.launch.fork_server.entrypoint import Target
    from rankwise.launch.report.failure import FailedAttempt

Kind = TypeVar("Kind", bound=Message)

END_SECONDS = 10.0
"""How long the launcher has to end its ranks after the caller is gone."""
REFUSED_EXIT_CODE = 2
LEFT_EXIT_CODE = 1


def main(token: str) -> NoReturn:
    """Carry out what the caller sends, and end this process. A rank leaves through here too."""
    end_quietly()
    caller = _Caller(token)
    try:
        caller.send(HostHere(rankwise=VERSION, address=_address()))
        spec = caller.receive(HostSpec)
        target, job = _prepare(spec)
        caller.send(Ready(rendezvous=None if job is None else job.address))
        options = replace(spec.options, rendezvous=caller.receive(Ready).rendezvous)
        _follow(caller)
        reporter = _HostReporter(is_first=options.node_rank == 0)
        exit_code = launch(target, options, reporter, job)
        caller.send(EndJob(exit_code=exit_code, what=reporter.last_report))
    except RankwiseError as error:
        error.where = error.where or socket.gethostname()
        caller.send(refusal(error))
        exit_code = REFUSED_EXIT_CODE
    # All is told and all is closed: what torch would still take down keeps the person waiting.
    os._exit(exit_code)


class _Caller:
    """The ends of stdin and stdout that lead to the caller."""

    def __init__(self, token: str) -> None:
        self._mark = mark(token)
        # Not sys.stdin, which is the ranks'.
        self._stdin = os.fdopen(0, "rb", closefd=False)

    def send(self, message: Message) -> None:
        """Send the caller a message; nothing happens where it has gone."""
        data = self._mark + line(message)
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(1, data) :]

    def receive(self, kind: type[Kind]) -> Kind:
        """Return the caller's next message, waiting for it; end this process where it is none of this kind."""
        text = self._stdin.readline()
        message = decode(text, "the caller") if text.endswith(b"\n") else None
        if not isinstance(message, kind):
            sys.exit(LEFT_EXIT_CODE)
        return message


# -- before anything starts ----------------------------------------------------------------------------


def _address() -> str:
    """Return the address of this host that other machines come to: the one that ssh came to."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    if len(words) == 4 and not network.is_loopback(words[2]):  # noqa: PLR2004 - two addresses and two ports
        return words[2]
    return network.main_address() or LOOPBACK


def _prepare(spec: HostSpec) -> tuple[Target, JobAddress | None]:
    """Check what can be checked, and take the port where this host serves the job.

    Raises:
        ConfigurationError: the folder, the script or the interface is not there.
        LaunchError: the script is not valid Python.
    """
    try:
        os.chdir(spec.folder)
    except OSError as error:
        raise ConfigurationError(
            f"The working directory {spec.folder} cannot be entered: {error.strerror}.",
            do="run rankwise in a folder that is at the same place on every host",
        ) from error
    os.environ.update({**spec.variables, "PWD": spec.folder, SECRET_NAME: spec.secret})
    find = find_module if spec.command.is_module else find_script
    target = find(spec.command.target, spec.command.arguments)
    if spec.options.node_rank or spec.options.rendezvous is None:
        return target, None
    return target, listen_towards(spec.options.rendezvous[0], spec.options)


# -- while the launcher runs ---------------------------------------------------------------------------


def _follow(caller: _Caller) -> None:
    """Fork a process that passes on what the caller signals, and ends this one when the caller is gone."""
    launcher = os.pidfd_open(os.getpid())
    if os.fork():
        os.close(launcher)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        return
    descendants.die_with_parent()
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    # They are the ranks' too: ssh waits for them to be closed.
    os.close(1)
    os.close(2)
    try:
        while True:
            number = signal.Signals[caller.receive(SignalHost).signal]
            signal.pidfd_send_signal(launcher, number)
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(launcher, signal.SIGHUP)
            select.select([launcher], [], [], END_SECONDS)
            signal.pidfd_send_signal(launcher, signal.SIGKILL)
        os._exit(0)


class _HostReporter(TerminalReporter):
    """Names this host in what the launcher says. Keeps the report of a failure for the caller, who shows it last.

    The first host's report is whole; the others would only point to it.
    """

    def __init__(self, *, is_first: bool) -> None:
        self.last_report = ""
        self._is_first = is_first
        self._prefix = f"[rankwise on {socket.gethostname()}] "

    def show(self, text: str) -> None:
        """Show ``text``, behind a report that was not the last."""
        shown = self.last_report + re.sub(r"^\[rankwise\] ", self._prefix, text, flags=re.MULTILINE)
        self.last_report = ""
        super().show(shown)

    def report(self, failed: FailedAttempt, text: str) -> None:  # noqa: ARG002 - the caller needs the text only
        """Keep the text of a failure."""
        self.last_report += text if self._is_first else ""
