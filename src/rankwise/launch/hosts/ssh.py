# SPDX-License-Identifier: Apache-2.0
"""Starts a job's hosts over ssh: on all of them or on none.

Runs no rank itself and imports no torch: it may be anybody's laptop. Imported by the command line.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from rankwise.errors import ConfigurationError, LaunchError
from rankwise.launch import auth
from rankwise.launch.agent.signals import PendingSignals, end_quietly
from rankwise.launch.hosts.host_monitor import HostMonitor
from rankwise.launch.hosts.message_stream import error_of
from rankwise.launch.hosts.ssh_sessions import SshSession, SshSessions
from rankwise.launch.messages import HostHere, HostReady, HostRefused, HostSpec, MessageError
from rankwise.version import VERSION
from rankwise.world.device import kinds

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping, Sequence

    from rankwise.launch.hosts.host_list import Host
    from rankwise.launch.options import LaunchOptions

Answer = TypeVar("Answer", HostHere, HostReady)

SSH_OPTIONS = (
    "BatchMode=yes",  # nobody is there to type a password
    "ConnectTimeout=15",
    "ServerAliveInterval=15",  # three unanswered ones end the connection
    "ControlMaster=no",  # an open one is used, but none made that would outlive the job
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
)
SSH_FAILED = 255
"""How ssh ends where it is ssh that failed."""
NOT_FOUND = {126, 127}
"""How a shell ends where a command is not there, or cannot be run."""
ANSWER_SECONDS = 60.0
"""How long a host may take for each answer before its ranks start."""
EVIDENCE_LINES = 5
PASSED_ON = (*kinds.PASSED_ON, "OMP_NUM_THREADS", "RANKWISE_CHECK", "RANKWISE_DEVICE")
_PREFIXES = ("NCCL_", "TORCH_")

# A file of the home folder must not stand for a module; what ranks import from comes with their script.
_PROGRAM = (
    "import sys; sys.flags.safe_path or sys.path.__setitem__(0, sys.exec_prefix); "
    "from rankwise.launch.hosts.remote import main; sys.exit(main(sys.argv[1]))"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteCommand:
    """What every rank of every host runs, as it was typed: only the hosts look for it."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]


class _Interrupted(Exception):
    """A signal came before any rank was started."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


def launch_on_hosts(
    command: RemoteCommand,
    hosts: Sequence[Host],
    options: LaunchOptions,
    *,
    nodes: tuple[int, int] | None,
    ssh: Sequence[str],
    show: Callable[[str], None],
) -> int:
    """Run a command's ranks on hosts, and return the exit code of the job.

    Args:
        command: what the ranks run, in this process's working directory, which must be on every host.
        hosts: the first one serves the others.
        options: of each host alone.
        nodes: the fewest and the most hosts that the job goes on with; ``None`` means all.
        ssh: the words of the ssh command.
        show: shows text to the person.

    Returns:
        What ``rankwise run`` returns on the first host, or 128 and the number of the signal that came before.

    Raises:
        ConfigurationError: ``nodes`` does not fit the hosts; a host lacks the folder, the script, this version of
            rankwise; there is no ssh. Nothing is left running.
        LaunchError: ssh does not lead to a host, or its ranks could not be started. Nothing is left running.
    """
    least, most = nodes or (len(hosts), len(hosts))
    if most != len(hosts):
        raise ConfigurationError(
            f"--hosts names {len(hosts)}, and --nodes allows up to {most}.",
            do=f"leave --nodes out, or pass --nodes MIN:{len(hosts)} to go on when some hosts are lost",
        )
    end_quietly()
    token = secrets.token_hex(8)
    with SshSessions(token, PendingSignals()) as sessions:
        try:
            _connect(sessions, hosts, ssh, token)
            _begin(sessions, ssh, _host_specs(command, hosts, options, (least, most)))
        except _Interrupted as interrupted:
            return 128 + interrupted.number
        return HostMonitor(sessions, least, show).follow()


# -- values --------------------------------------------------------------------------------------------


def split_command(text: str) -> list[str]:
    """Return the words of the ssh command as a shell splits them.

    Raises:
        ConfigurationError: a quote is left open, or there are none.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(
            f"--ssh {text!r} is no command: {error}.", do="for example --ssh 'ssh -F FILE'"
        ) from None
    if not words:
        raise ConfigurationError("--ssh names no command.", do="leave it out, or for example --ssh 'ssh -F FILE'")
    return words


def ssh_argv(ssh: Sequence[str], host: Host, python: Sequence[str], token: str, python_path: str | None) -> list[str]:
    """Return the words that start a host's end.

    Args:
        ssh: the ssh command.
        host: where to.
        python: the interpreter there, with its own options.
        token: marks the host's messages. No secret.
        python_path: ``PYTHONPATH``, which only counts when Python starts.
    """
    path = [] if python_path is None else [f"PYTHONPATH={python_path}"]
    remote = shlex.join(["exec", "env", *path, *python, "-c", _PROGRAM, token])
    chosen = [word for option in SSH_OPTIONS for word in ("-o", option)]
    return [*ssh, "-T", *chosen, "--", host.destination, remote]


def passed_on(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hosts are given: few, since most describe this machine."""
    return {name: value for name, value in variables.items() if name in PASSED_ON or name.startswith(_PREFIXES)}


def _host_specs(
    command: RemoteCommand, hosts: Sequence[Host], options: LaunchOptions, nodes: tuple[int, int]
) -> Callable[[Sequence[HostHere]], list[HostSpec]]:
    """Return what makes each host's spec, once all have sent where they are."""
    shared = auth.draw()

    def host_specs(heres: Sequence[HostHere]) -> list[HostSpec]:
        addresses = [here.address for here in heres]
        return [
            HostSpec(
                folder=_folder(),
                target=command.target,
                is_module=command.is_module,
                arguments=command.arguments,
                options=options if host.num_ranks is None else replace(options, num_ranks=host.num_ranks),
                nodes=nodes,
                node_rank=number,
                peers=tuple(one for other, one in enumerate(addresses) if other != number and one is not None),
                secret=shared,
                variables=passed_on(os.environ),
            )
            for number, host in enumerate(hosts)
        ]

    return host_specs


def _folder() -> str:
    """Return the working directory by the name it was entered under: links may lead elsewhere on other machines."""
    entered, real = os.environ.get("PWD", ""), Path.cwd()
    is_it = Path(entered).is_absolute() and Path(entered).exists() and Path(entered).samefile(real)
    return entered if is_it else str(real)


def _python_path() -> str | None:
    """Return ``PYTHONPATH`` for a process that starts elsewhere."""
    given = os.environ.get("PYTHONPATH")
    return None if given is None else os.pathsep.join(str(Path(entry).absolute()) for entry in given.split(os.pathsep))


# -- the beginning -------------------------------------------------------------------------------------


def _connect(sessions: SshSessions, hosts: Sequence[Host], ssh: Sequence[str], token: str) -> None:
    flags: list[str] = vars(subprocess)["_args_from_interpreter_flags"]()
    python = [sys.executable, *flags]
    for host in hosts:
        try:
            sessions.open(host, ssh_argv(ssh, host, python, token, _python_path()))
        except OSError as error:
            raise ConfigurationError(
                f"The command {ssh[0]!r} cannot be run: {error.strerror}.",
                do="apt-get install openssh-client, or name another one: --ssh 'ssh -F FILE'",
            ) from error


def _begin(
    sessions: SshSessions, ssh: Sequence[str], host_specs: Callable[[Sequence[HostHere]], list[HostSpec]]
) -> None:
    """Start all hosts' ranks, or none: first all are there, then all are ready, then all start."""
    heres = _answers(sessions, ssh, HostHere)
    for session, here in zip(sessions.all, heres, strict=True):
        _check_version(session.host, here.rankwise, ssh)
    for session, spec in zip(sessions.all, host_specs(heres), strict=True):
        session.send(spec)
    rendezvous = _answers(sessions, ssh, HostReady)[0].rendezvous
    for session in sessions.all:
        session.start(rendezvous)


def _answers(sessions: SshSessions, ssh: Sequence[str], kind: type[Answer]) -> list[Answer]:
    """Return the next message of each host, which is of one kind.

    Raises:
        ConfigurationError, LaunchError: one of them cannot take part.
        _Interrupted: a signal came.
    """
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        for session in sessions.all:
            first = session.messages[0] if session.messages else None
            if isinstance(first, HostRefused):
                raise _refusal(session, first)
            if first is not None and not isinstance(first, kind):
                raise MessageError(
                    f"{session.host.name} sent {type(first).__name__}, and {kind.__name__} was expected."
                )
            if first is None and session.exit_code is not None:
                raise _never_began(session, ssh)
        silent = [one.host.name for one in sessions.all if not one.messages]
        if not silent:
            return [cast("Answer", session.messages.popleft()) for session in sessions.all]
        left = deadline - time.monotonic()
        if left <= 0:
            raise LaunchError(
                f"No answer from {', '.join(silent)} for {ANSWER_SECONDS:.0f} s.",
                do=f"{shlex.join([*ssh, silent[0]])} {sys.executable} -c 'import rankwise'",
            )
        number = sessions.turn(left)
        if number is not None:
            raise _Interrupted(number)


def _check_version(host: Host, version: str, ssh: Sequence[str]) -> None:
    if version != VERSION:
        raise ConfigurationError(
            f"{host.name} has rankwise {version}, and this machine {VERSION}.", do=_install(host, ssh)
        )


def _refusal(session: SshSession, refused: HostRefused) -> ConfigurationError | LaunchError:
    error = error_of(refused)
    if error.do is None and isinstance(error, ConfigurationError):
        folder = _folder()
        error.supplement(do=f"bring it there: rsync -a {shlex.quote(folder)}/ {session.host.destination}:{folder}/")
    return error


def _never_began(session: SshSession, ssh: Sequence[str]) -> ConfigurationError | LaunchError:
    """Return the problem with a host that ended without having sent a message."""
    host, code = session.host, session.exit_code
    said = [line for line in session.early.decode(errors="replace").splitlines() if line.strip()]
    evidence = "\n".join(line.strip() for line in said[-EVIDENCE_LINES:]) or None
    if code == SSH_FAILED:
        return LaunchError(
            f"ssh does not lead to {host.name}.",
            evidence=evidence,
            do=f"{shlex.join([*ssh, host.destination])} true\nit has to end well without asking for anything",
        )
    if code in NOT_FOUND:
        return ConfigurationError(
            f"There is no {sys.executable} on {host.name}.",
            evidence=evidence,
            do="install the same environment at the same place on every host",
        )
    if any("No module named 'rankwise.launch" in line for line in said):
        return ConfigurationError(f"{host.name} has an older rankwise.", evidence=evidence, do=_install(host, ssh))
    if any("No module named 'rankwise'" in line for line in said):
        return ConfigurationError(
            f"There is no rankwise for {sys.executable} on {host.name}.", evidence=evidence, do=_install(host, ssh)
        )
    return LaunchError(
        f"{host.name} ended before any rank was started: exit code {code}.",
        evidence=evidence,
        do=f"{shlex.join([*ssh, host.destination])} {sys.executable} -c 'import rankwise'",
    )


def _install(host: Host, ssh: Sequence[str]) -> str:
    return f"{shlex.join([*ssh, host.destination])} {sys.executable} -m pip install rankwise=={VERSION}"
