# SPDX-License-Identifier: Apache-2.0
"""Starts a job's hosts over ssh, all of them or none, and monitors them to the end.

Runs no rank itself and does not import torch: it may run on a laptop. Imported by the command line.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from rankwise.errors import ConfigurationError, LaunchError
from rankwise.launch.agent.signals import Interrupted, PendingSignals, end_quietly
from rankwise.launch.auth import draw_secret
from rankwise.launch.hosts.ssh_sessions import SshSession, SshSessions
from rankwise.launch.messages import EndJob, HostHere, HostSpec, MessageError, Ready, Refuse, SignalHost, error_of
from rankwise.launch.rendezvous import ANY_PORT
from rankwise.version import VERSION
from rankwise.world.device import kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankwise.launch.hosts.host_list import Host
    from rankwise.launch.messages import RemoteCommand
    from rankwise.launch.options import LaunchOptions

Answer = TypeVar("Answer", HostHere, Ready)

SSH_OPTIONS = (
    "BatchMode=yes",  # passwords cannot be typed
    "ConnectTimeout=15",
    "ServerAliveInterval=15",  # three unanswered ones end the connection
    "ControlMaster=no",  # an open one is used, but none made that would outlive the job
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
)
SSH_FAILED = 255
"""Exit code of ssh if ssh itself failed."""
NOT_FOUND = {126, 127}
"""Exit codes of a shell if a command does not exist, or cannot be run."""
HOST_ANSWER_SECONDS = 60.0
"""How long a host may take for each answer before its ranks start."""
EVIDENCE_LINES = 5
CONCLUDE_SECONDS = 20.0
"""How long the hosts may take to exit by themselves if the job cannot continue."""
HOST_LEAVE_SECONDS = 10.0
"""How long they may take once told to."""
PASSED_ON = (*kinds.PASSED_ON, "OMP_NUM_THREADS", "RANKWISE_AUTO_SPLIT", "RANKWISE_CHECK", "RANKWISE_DEVICE")
_PREFIXES = ("NCCL_", "TORCH_")

# A file in the home folder must not shadow a module; the ranks' import path is set with their script.
_PROGRAM = (
    "import sys; sys.flags.safe_path or sys.path.__setitem__(0, sys.exec_prefix); "
    "from rankwise.launch.hosts.remote import main; main(sys.argv[1])"
)


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
        nodes: the fewest and the most hosts that the job runs with; ``None`` means all.
        ssh: the arguments of the ssh command.
        show: shows text to the user.

    Returns:
        What ``rankwise run`` returns on the first host, or 128 plus the number of a signal received before.

    Raises:
        ConfigurationError: ``nodes`` does not fit the hosts; a host lacks the folder, the script, this version of
            rankwise; there is no ssh. Nothing is left running.
        LaunchError: ssh cannot connect to a host, or its ranks could not be started. Nothing is left running.
    """
    least, most = nodes or (len(hosts), len(hosts))
    if most != len(hosts):
        raise ConfigurationError(
            f"--nodes allows up to {most} hosts, but --hosts has {len(hosts)}.",
            do=f"remove --nodes, or pass --nodes MIN:{len(hosts)} to continue if some hosts are lost",
        )
    end_quietly()
    token = secrets.token_hex(8)
    with SshSessions(token, PendingSignals()) as sessions:
        try:
            _connect(sessions, hosts, ssh, token)
            _start(sessions, ssh, command, options, (least, most))
        except Interrupted as interrupted:
            return 128 + interrupted.number
        return _HostMonitor(sessions, least, show).follow()


# -- values --------------------------------------------------------------------------------------------


def split_command(text: str) -> list[str]:
    """Return the words of the ssh command as a shell splits them.

    Raises:
        ConfigurationError: a quote is not closed, or the command is empty.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(
            f"--ssh {text!r} cannot be parsed: {error}.", do="for example --ssh 'ssh -F FILE'"
        ) from None
    if not words:
        raise ConfigurationError(
            "The --ssh command is empty.", do="remove --ssh, or pass for example --ssh 'ssh -F FILE'"
        )
    return words


def ssh_argv(ssh: Sequence[str], host: Host, python: Sequence[str], token: str, python_path: str | None) -> list[str]:
    """Return the arguments that start a host's end; ``token`` marks the host's messages and is no secret."""
    path = [] if python_path is None else [f"PYTHONPATH={python_path}"]
    remote = shlex.join(["exec", "env", *path, *python, "-c", _PROGRAM, token])
    chosen = [word for option in SSH_OPTIONS for word in ("-o", option)]
    return [*ssh, "-T", *chosen, "--", host.destination, remote]


def passed_on(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are passed to hosts: few, since most describe this machine."""
    return {name: value for name, value in variables.items() if name in PASSED_ON or name.startswith(_PREFIXES)}


def working_folder() -> str:
    """Return the working directory by the path it was entered with: links may differ on other machines."""
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
                do="apt-get install openssh-client, or pass another command: --ssh 'ssh -F FILE'",
            ) from error


def _start(
    sessions: SshSessions, ssh: Sequence[str], command: RemoteCommand, options: LaunchOptions, nodes: tuple[int, int]
) -> None:
    """Start all hosts' ranks, or none: first all connect, then all are ready, then all start."""
    heres = _answers(sessions, ssh, HostHere)
    for session, here in zip(sessions.all, heres, strict=True):
        if here.rankwise != VERSION:
            raise ConfigurationError(
                f"{session.host.name} has rankwise {here.rankwise}, but this machine has {VERSION}.",
                do=_install(session.host, ssh),
            )
    options = replace(options, nodes=nodes, rendezvous=(heres[1].address, ANY_PORT) if heres[1:] else None)
    secret = draw_secret()
    for node_rank, session in enumerate(sessions.all):
        num_ranks = session.host.num_ranks or options.num_ranks
        own = replace(options, num_ranks=num_ranks, node_rank=node_rank)
        variables = passed_on(os.environ)
        session.send(
            HostSpec(folder=working_folder(), command=command, options=own, secret=secret, variables=variables)
        )
    rendezvous = _answers(sessions, ssh, Ready)[0].rendezvous
    for session in sessions.all:
        session.show()
        session.send(Ready(rendezvous=rendezvous))


def _answers(sessions: SshSessions, ssh: Sequence[str], kind: type[Answer]) -> list[Answer]:
    """Return the next message of each host, all of one kind; raise the refusal of any, or a signal as Interrupted."""
    deadline = time.monotonic() + HOST_ANSWER_SECONDS
    while True:
        for session in sessions.all:
            answer = session.message
            if isinstance(answer, Refuse):
                raise _refusal(session, answer)
            if answer is not None and not isinstance(answer, kind):
                raise MessageError(
                    f"{session.host.name} sent {type(answer).__name__}, but {kind.__name__} was expected."
                )
            if answer is None and session.exit_code is not None:
                raise _never_began(session, ssh)
        silent = [one.host.name for one in sessions.all if one.message is None]
        if not silent:
            return [cast("Answer", session.pop_message()) for session in sessions.all]
        left = deadline - time.monotonic()
        if left <= 0:
            raise LaunchError(
                f"No answer from {', '.join(silent)} for {HOST_ANSWER_SECONDS:.0f} s.",
                do=f"{shlex.join([*ssh, silent[0]])} {sys.executable} -c 'import rankwise'",
            )
        number = sessions.turn(left)
        if number is not None:
            raise Interrupted(number)


def _refusal(session: SshSession, refused: Refuse) -> ConfigurationError | LaunchError:
    error = error_of(refused)
    if error.do is None and isinstance(error, ConfigurationError):
        folder = working_folder()
        error.supplement(do=f"copy it there: rsync -a {shlex.quote(folder)}/ {session.host.destination}:{folder}/")
    return error


def _never_began(session: SshSession, ssh: Sequence[str]) -> ConfigurationError | LaunchError:
    """Return the error for a host whose session ended without a message."""
    host, code = session.host, session.exit_code
    said = [line.decode(errors="replace").strip() for line in session.early]
    evidence = "\n".join(said[-EVIDENCE_LINES:]) or None
    if code == SSH_FAILED:
        return LaunchError(
            f"ssh cannot connect to {host.name}.",
            evidence=evidence,
            do=f"{shlex.join([*ssh, host.destination])} true\nit must succeed without prompting",
        )
    if code in NOT_FOUND:
        return ConfigurationError(
            f"{sys.executable} does not exist on {host.name}.",
            evidence=evidence,
            do="install the same environment at the same path on every host",
        )
    if any("No module named 'rankwise.launch" in line for line in said):
        return ConfigurationError(f"{host.name} has an older rankwise.", evidence=evidence, do=_install(host, ssh))
    if any("No module named 'rankwise'" in line for line in said):
        return ConfigurationError(
            f"rankwise is not installed for {sys.executable} on {host.name}.", evidence=evidence, do=_install(host, ssh)
        )
    return LaunchError(
        f"{host.name} exited before any rank was started: exit code {code}.",
        evidence=evidence,
        do=f"{shlex.join([*ssh, host.destination])} {sys.executable} -c 'import rankwise'",
    )


def _install(host: Host, ssh: Sequence[str]) -> str:
    return f"{shlex.join([*ssh, host.destination])} {sys.executable} -m pip install rankwise=={VERSION}"


# -- until the end -----------------------------------------------------------------------------------------


class _HostMonitor:
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
                self._deadline = time.monotonic() + HOST_LEAVE_SECONDS
        return self._exit_code()

    def _pass_on(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR2:
            # The first host asks all ranks to save and stop.
            self._sessions.all[0].send(SignalHost(signal=number.name))
            return
        self._sessions.send_all(SignalHost(signal=number.name))
        self._end_within(CONCLUDE_SECONDS if self._signal is None else HOST_LEAVE_SECONDS)
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
