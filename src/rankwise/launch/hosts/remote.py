# SPDX-License-Identifier: Apache-2.0
"""One host's end of a job started over ssh: receives what to run on stdin, launches it, and exits with its caller.

Two processes: one monitors the caller, the other, forked from it, is the host's launcher. Started by ``ssh``
through a shell of the host, and not imported elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from rankwise.errors import ConfigurationError, RankwiseError
from rankwise.launch.agent.signals import HANDLED, end_quietly
from rankwise.launch.fork_server.entrypoint import find_target
from rankwise.launch.hosts.ssh_sessions import line, mark
from rankwise.launch.messages import EndJob, HostHere, HostSpec, Message, Ready, SignalHost, decode, refusal
from rankwise.launch.rendezvous import LOOPBACK, JobAddress, listen_towards
from rankwise.launch.report.exit_code import shell_code
from rankwise.launch.report.failure_report import TerminalReporter
from rankwise.launch.start import launch
from rankwise.version import VERSION
from rankwise.world import network, processes
from rankwise.world.environments.reading import SECRET_NAME

if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

    from rankwise.launch.fork_server.entrypoint import Target
    from rankwise.launch.report.failure import FailedAttempt

Kind = TypeVar("Kind", bound=Message)

LAUNCHER_EXIT_SECONDS = 10.0
"""How long the launcher may take to terminate its ranks after the caller has exited."""
REFUSED_EXIT_CODE = 2
LEFT_EXIT_CODE = 1


def main(token: str) -> NoReturn:
    """Execute what the caller sends, and exit. A rank also returns through here."""
    end_quietly()
    caller = _Caller(token)
    try:
        caller.send(HostHere(rankwise=VERSION, address=_address()))
        spec = caller.receive(HostSpec)
        target, job = _prepare(spec)
        caller.send(Ready(rendezvous=None if job is None else job.address))
        options = replace(spec.options, rendezvous=caller.receive(Ready).rendezvous)
        _fork_launcher(caller)
        reporter = _HostReporter(is_first=options.node_rank == 0)
        exit_code = launch(target, options, reporter, job)
        caller.send(EndJob(exit_code=exit_code, what=reporter.last_report))
    except RankwiseError as error:
        error.supplement(where=error.where or socket.gethostname())
        caller.send(refusal(error))
        exit_code = REFUSED_EXIT_CODE
    # Everything is reported and closed: torch's shutdown would only take longer.
    os._exit(exit_code)


class _Caller:
    """The stdin and stdout that are connected to the caller."""

    def __init__(self, token: str) -> None:
        self._mark = mark(token)
        # Not sys.stdin, which belongs to the ranks.
        self._stdin = os.fdopen(0, "rb", closefd=False)

    def send(self, message: Message) -> None:
        """Send the caller a message; does nothing if it has exited."""
        data = self._mark + line(message)
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(1, data) :]

    def receive(self, kind: type[Kind]) -> Kind:
        """Return the caller's next message, waiting for it; exit if it is not of this kind."""
        text = self._stdin.readline()
        message = decode(text, "the caller") if text.endswith(b"\n") else None
        if not isinstance(message, kind):
            sys.exit(LEFT_EXIT_CODE)
        return message


# -- before anything starts ----------------------------------------------------------------------------


def _address() -> str:
    """Return the address at which other machines reach this host: the one that ssh connected to."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    if len(words) == 4 and not network.is_loopback(words[2]):  # noqa: PLR2004 - two addresses and two ports
        return words[2]
    return network.main_address() or LOOPBACK


def _prepare(spec: HostSpec) -> tuple[Target, JobAddress | None]:
    """Run all checks, and bind the port if this host serves the job."""
    try:
        os.chdir(spec.folder)
    except OSError as error:
        raise ConfigurationError(
            f"The working directory {spec.folder} cannot be entered: {error.strerror}.",
            do="run rankwise in a folder that has the same path on every host",
        ) from error
    os.environ.update({**spec.variables, "PWD": spec.folder, SECRET_NAME: spec.secret})
    target = find_target(spec.command.target, spec.command.arguments, is_module=spec.command.is_module)
    if spec.options.node_rank or spec.options.rendezvous is None:
        return target, None
    return target, listen_towards(spec.options.rendezvous[0], spec.options)


# -- while the launcher runs ---------------------------------------------------------------------------


def _fork_launcher(caller: _Caller) -> None:
    """Return in a fork of this process: the launcher. This one forwards the caller's signals, and exits with it."""
    watcher = os.getpid()
    signal.signal(signal.SIGCHLD, _end_as_launcher)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        processes.die_with_parent()
        if os.getppid() != watcher:
            os._exit(LEFT_EXIT_CODE)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        return
    for number in HANDLED:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    try:
        while True:
            os.kill(pid, signal.Signals[caller.receive(SignalHost).signal])
    finally:
        # The caller has exited, or has sent something other than a signal.
        os.kill(pid, signal.SIGHUP)
        time.sleep(LAUNCHER_EXIT_SECONDS)
        os.kill(pid, signal.SIGKILL)
        signal.pause()


def _end_as_launcher(_number: int, _frame: FrameType | None) -> None:
    """Exit this process as the launcher has exited, wherever it waits."""
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid:
        os._exit(shell_code(os.waitstatus_to_exitcode(status)))


class _HostReporter(TerminalReporter):
    """Adds this host's name to the launcher's output. Keeps the report of a failure for the caller to show last.

    The first host's report is complete; the others would only refer to it.
    """

    def __init__(self, *, is_first: bool) -> None:
        self.last_report = ""
        self._is_first = is_first
        self._prefix = f"[rankwise on {socket.gethostname()}] "

    def show(self, text: str) -> None:
        """Show ``text``, after any report that was not the last."""
        shown = self.last_report + re.sub(r"^\[rankwise\] ", self._prefix, text, flags=re.MULTILINE)
        self.last_report = ""
        super().show(shown)

    def report(self, failed: FailedAttempt, text: str) -> None:  # noqa: ARG002 - the caller needs the text only
        self.last_report += text if self._is_first else ""
