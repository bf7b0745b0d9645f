# SPDX-License-Identifier: Apache-2.0
"""One host's end of a job started over ssh: receives its spec on stdin, runs it, and ends with its caller.

Two processes: one follows the caller to the end, the other, forked from it, is the host's launcher. Started by ``ssh``
through a shell of the host, and imported by nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from rankwise.errors import ConfigurationError, RankwiseError
from rankwise.launch.agent.signals import HANDLED, end_quietly
from rankwise.launch.fork_server.entrypoint import find_target
from rankwise.launch.hosts.message_stream import line, mark, refusal
from rankwise.launch.messages import (
    FromHost,
    HostEnded,
    HostHere,
    HostReady,
    HostSpec,
    Message,
    SignalHost,
    StartHost,
    decode,
)
from rankwise.launch.port import listen_for_hosts
from rankwise.launch.report.exit_code import shell_code
from rankwise.version import VERSION
from rankwise.world import network

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from rankwise.launch.fork_server.entrypoint import Target
    from rankwise.launch.options import LaunchOptions
    from rankwise.launch.report.failure import FailedAttempt, Failure

END_SECONDS = 10.0
"""How long the launcher has to end its ranks after the caller is gone."""
LOOPBACK = "127.0.0.1"
REFUSED_EXIT_CODE = 2
LEFT_EXIT_CODE = 1
_PR_SET_PDEATHSIG = 1


def main(token: str) -> int:
    """Carry out what the caller sends, and return the exit code. A rank leaves through here too."""
    end_quietly()
    caller = _Caller(token)
    try:
        caller.send(HostHere(rankwise=VERSION, hostname=socket.gethostname(), address=_address()))
        spec = caller.receive()
        if not isinstance(spec, HostSpec):
            return LEFT_EXIT_CODE
        target, listener = _prepare(spec)
        caller.send(HostReady(rendezvous=None if listener is None else _address_of(listener)))
        start = caller.receive()
        if not isinstance(start, StartHost):
            return LEFT_EXIT_CODE
    except RankwiseError as error:
        caller.send(refusal(_located(error)))
        return REFUSED_EXIT_CODE
    watcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        _end_with(watcher)
        _launch(spec, target, listener, start.rendezvous, caller)
    if listener is not None:
        listener.close()
    return _watch(pid, caller)


class _Caller:
    """The ends of stdin and stdout that lead to the caller."""

    def __init__(self, token: str) -> None:
        self._mark = mark(token)
        self._arrived = b""

    def send(self, message: FromHost) -> None:
        """Send the caller a message; nothing happens where it has gone."""
        data = self._mark + line(message)
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(1, data) :]

    def receive(self) -> Message | None:
        """Return the caller's next message, waiting for it, or ``None`` when there is none to come."""
        while b"\n" not in self._arrived:
            data = os.read(0, 1 << 16)
            if not data:
                return None
            self._arrived += data
        text, _, self._arrived = self._arrived.partition(b"\n")
        return decode(text, "the caller")

    def has_more(self) -> bool:
        """Whether another message has come already."""
        return b"\n" in self._arrived


# -- before anything starts ----------------------------------------------------------------------------


def _address() -> str | None:
    """Return the address of this host that other machines come to: the one that ssh came to."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    if len(words) == 4 and not network.is_loopback(words[2]):  # noqa: PLR2004 - two addresses and two ports
        return words[2]
    return network.main_address()


def _prepare(spec: HostSpec) -> tuple[Target, socket.socket | None]:
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
    os.environ.update({**spec.variables, "PWD": spec.folder})
    target = find_target(spec.target, spec.arguments, is_module=spec.is_module)
    if spec.node_rank > 0 or spec.nodes[1] == 1:
        return target, None
    address = _serving_address(spec)
    return target, listen_for_hosts(address)


def _serving_address(spec: HostSpec) -> str:
    """Return the address that the other hosts reach this one under.

    Raises:
        ConfigurationError: there is no such interface, or no network leads to the others.
    """
    name = spec.options.interface
    if name is not None:
        held = [address for one in network.interfaces() if one.name == name for address in one.addresses]
        if not held:
            raise ConfigurationError(
                f"There is no interface {name} with an address.",
                evidence="\n".join(network.interface_lines()),
                do="pass --interface with one of these, or leave it out",
            )
        return held[0]
    if not spec.peers:
        return network.main_address() or LOOPBACK
    return network.route_to(spec.peers[0]).local_address


def _address_of(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()[:2]
    return host, port


def _located(error: RankwiseError) -> RankwiseError:
    return error.supplement(where=error.where or socket.gethostname())


# -- the process that follows the caller ---------------------------------------------------------------


def _watch(pid: int, caller: _Caller) -> int:
    """Pass on what the caller signals, end the launcher when the caller is gone, and return its exit code."""
    launcher = os.pidfd_open(pid)

    def send(number: int, _frame: FrameType | None = None) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(launcher, number)

    for number in HANDLED:
        signal.signal(number, send)
    deadline: float | None = None
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select([launcher] if deadline is not None else [launcher, 0], [], [], left)
        if launcher in readable:
            _, status = os.waitpid(pid, 0)
            return shell_code(os.waitstatus_to_exitcode(status))
        if not readable:
            send(signal.SIGKILL)
            deadline = time.monotonic() + END_SECONDS
            continue
        message = caller.receive()
        if message is None:
            send(signal.SIGHUP)
            deadline = time.monotonic() + END_SECONDS
        while isinstance(message, SignalHost):
            send(signal.Signals[message.signal])
            message = caller.receive() if caller.has_more() else None


# -- the launcher --------------------------------------------------------------------------------------


def _launch(
    spec: HostSpec,
    target: Target,
    listener: socket.socket | None,
    rendezvous: tuple[str, int] | None,
    caller: _Caller,
) -> NoReturn:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # Only now: the process that follows the caller stays small.
    from rankwise.launch.rendezvous import JobAddress, interface_to  # noqa: PLC0415
    from rankwise.launch.start import launch  # noqa: PLC0415
    from rankwise.store import wire  # noqa: PLC0415

    reporter = _HostReporter(is_first=spec.node_rank == 0)
    options, job_address = spec.options, None
    try:
        if rendezvous is not None:
            host, port = rendezvous
            options = _among_others(spec, (host, port))
            if listener is not None:
                wire.close_in_children(listener)
            interface = options.interface or interface_to(host)
            job_address = JobAddress(address=(host, port), secret=spec.secret, listener=listener, interface=interface)
        exit_code = launch(target, options, reporter, job_address)
    except RankwiseError as error:
        caller.send(refusal(_located(error)))
        _leave(REFUSED_EXIT_CODE)
    caller.send(HostEnded(exit_code=exit_code, report=reporter.last_report))
    # All is told and all is closed: what torch would still take down keeps the person waiting.
    _leave(exit_code)


def _among_others(spec: HostSpec, rendezvous: tuple[str, int]) -> LaunchOptions:
    return replace(spec.options, nodes=spec.nodes, node_rank=spec.node_rank, rendezvous=rendezvous)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process with its parent. Source: prctl(2)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        _leave(LEFT_EXIT_CODE)


def _leave(exit_code: int) -> NoReturn:
    os._exit(exit_code)


class _HostReporter:
    """Shows what the launcher says, and of which host it speaks. Keeps the report of a failure for the caller.

    The first host's report is whole; the others would only point to it.
    """

    def __init__(self, *, is_first: bool) -> None:
        self.last_report = ""
        self._is_first = is_first
        self._prefix = f"[rankwise on {socket.gethostname()}] "

    def show(self, text: str) -> None:
        """Show ``text``, now or when something follows it."""
        shown = self.last_report + re.sub(r"^\[rankwise\] ", self._prefix, text, flags=re.MULTILINE)
        self.last_report = ""
        # A caller that is gone must not keep the launcher from ending its ranks.
        with contextlib.suppress(OSError):
            sys.stderr.write(shown)
            sys.stderr.flush()

    def report(self, failed: FailedAttempt, text: str) -> None:  # noqa: ARG002 - the caller needs the text only
        """Keep the text of a failure."""
        self.last_report += text if self._is_first else ""

    def end(self, failures: Mapping[int, Failure]) -> None:
        """Show nothing: all has been said."""
