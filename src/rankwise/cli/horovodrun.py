# SPDX-License-Identifier: Apache-2.0
"""``rankwise horovodrun``: horovodrun's options, translated into those of ``rankwise run``. Starts nothing itself."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.cli import run
from rankwise.cli.arguments import Command
from rankwise.errors import ConfigurationError
from rankwise.launch.fork_server.entrypoint import find_command, find_script, is_python
from rankwise.launch.hosts import host_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.launch.hosts.host_list import Slots


RESTARTS = 3
"""How often an elastic job restarts if --reset-limit is not given."""
COMPAT = "rankwise.compat.horovod"

NO_TUNING = "nothing is tuned: tensors that are ready together are sent together"
NO_WARNINGS = "a rank that waits too long names the missing ranks, and fails after 10 minutes"
NO_CYCLES = "there is no background thread with cycles"
NOTED = {
    "--gloo": "the backend is chosen from where the ranks run",
    "--mpi": f"the backend is chosen from where the ranks run; with mpirun: mpirun -n 4 python -m {COMPAT} train.py",
    "--tcp": "the backend is chosen from where the ranks run",
    "--verbose": "rankwise always logs what it decides",
    "--disable-cache": "host checks are not cached",
    "--hierarchical-allreduce": "ranks on one machine already use shared memory",
    "--no-hierarchical-allreduce": NO_TUNING,
    "--hierarchical-allgather": "ranks on one machine already use shared memory",
    "--no-hierarchical-allgather": NO_TUNING,
    "--torus-allreduce": NO_TUNING,
    "--no-torus-allreduce": NO_TUNING,
    "--autotune": NO_TUNING,
    "--no-autotune": NO_TUNING,
    "--timeline-mark-cycles": NO_CYCLES,
    "--no-timeline-mark-cycles": NO_CYCLES,
    "--no-stall-check": NO_WARNINGS,
    "--stall-check": NO_WARNINGS,
    "--mpi-threads-disable": "MPI is not used",
    "--no-mpi-threads-disable": "MPI is not used",
    "--log-with-timestamp": "rankwise's log lines have no timestamp",
    "--log-without-timestamp": "rankwise's log lines have no timestamp",
    "--log-hide-timestamp": "rankwise's log lines have no timestamp",
    "--no-log-hide-timestamp": "rankwise's log lines have no timestamp",
}
"""Options without a value that have no effect here, and why."""
NOTED_WITH_VALUE = {
    "--fusion-threshold-mb": NO_TUNING,
    "--cycle-time-ms": NO_TUNING,
    "--cache-capacity": NO_TUNING,
    "--autotune-log-file": NO_TUNING,
    "--autotune-warmup-samples": NO_TUNING,
    "--autotune-steps-per-sample": NO_TUNING,
    "--autotune-bayes-opt-max-samples": NO_TUNING,
    "--autotune-gaussian-process-noise": NO_TUNING,
    "--stall-check-warning-time-seconds": NO_WARNINGS,
    "--stall-check-shutdown-time-seconds": "set HOROVOD_STALL_SHUTDOWN_TIME_SECONDS before the command",
    "--num-nccl-streams": "torch chooses NCCL's streams",
    "--thread-affinity": "there is no background thread",
    "--gloo-timeout-seconds": NO_WARNINGS,
    "--log-level": "set HOROVOD_LOG_LEVEL before the command",
    "--elastic-timeout": "the wait for lost machines is 30 s",
}
"""The same for options with a value."""
REFUSED = {
    "--jsrun": (0, f"start the ranks yourself: jsrun -n 4 python -m {COMPAT} train.py"),
    "--mpi-args": (1, f"give them to mpirun: mpirun ... python -m {COMPAT} train.py"),
    "--binding-args": (1, f"give them to mpirun: mpirun ... python -m {COMPAT} train.py"),
    "--config-file": (1, "pass its options on the command line"),
    "--blacklist-cooldown-range": (2, "leave it out: a machine that comes back rejoins immediately"),
    "--prefix-output-with-timestamp": (0, "leave it out; --output-filename DIR keeps each rank's lines apart"),
    "-prefix-timestamp": (0, "leave it out; --output-filename DIR keeps each rank's lines apart"),
    "--check-build": (0, "run `rankwise doctor`, which shows what is available on every machine"),
    "-cb": (0, "run `rankwise doctor`, which shows what is available on every machine"),
    "--version": (0, "run `rankwise doctor`, which shows the versions"),
    "-v": (0, "run `rankwise doctor`, which shows the versions"),
}
"""Options that are not supported: how many values each takes, and what to write instead."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("-np", "--num-proc", dest="num_ranks", type=int, metavar="N", help="total number of ranks")
    parser.add_argument("--output-filename", dest="log_dir", metavar="DIR", help="write DIR/rank-0.out and so on")
    parser.add_argument(
        "--timeline-filename", dest="timeline", metavar="FILE", help="write a timeline of all ranks, as trace events"
    )
    hosts = parser.add_argument_group("several machines")
    named = hosts.add_mutually_exclusive_group()
    named.add_argument("-H", "--hosts", metavar="A:SLOTS,...", help="hosts, and how many ranks each can run")
    named.add_argument("-hostfile", "--hostfile", metavar="FILE", help="the same, one line per host: NAME slots=SLOTS")
    named.add_argument("--host-discovery-script", metavar="SCRIPT", help="not supported: shows what to write instead")
    hosts.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="ssh's port on the hosts")
    hosts.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="ssh's private key")
    hosts.add_argument(
        "--network-interface",
        "--network-interfaces",
        dest="interfaces",
        action="append",
        default=[],
        metavar="NAME",
        help="network interface for traffic between ranks",
    )
    hosts.add_argument("--start-timeout", type=int, metavar="SECONDS", help="how long machines wait for one another")
    elastic = parser.add_argument_group("elastic jobs")
    elastic.add_argument(
        "--min-np", "--min-num-proc", dest="fewest", type=int, metavar="N", help="continue with no fewer than N ranks"
    )
    elastic.add_argument(
        "--max-np", "--max-num-proc", dest="most", type=int, metavar="N", help="use no more than N ranks"
    )
    elastic.add_argument("--slots-per-host", type=int, metavar="N", help="for --host-discovery-script")
    elastic.add_argument("--reset-limit", type=int, metavar="R", help="restart at most R times (default: 3)")
    for name in NOTED:
        parser.add_argument(name, dest="noted", action="append_const", const=name, help=argparse.SUPPRESS)
    for name in NOTED_WITH_VALUE:
        parser.add_argument(name, dest=f"noted{name}", help=argparse.SUPPRESS)
    for name, (num_values, _) in REFUSED.items():
        parser.add_argument(name, dest="refused", action=_Refuse, nargs=num_values, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="python train.py", help="what every rank runs")


def execute(options: argparse.Namespace) -> int:
    """Print the equivalent rankwise command, and run it."""
    words = translate(options)
    for text in [*notes(options), f"equivalent command: rankwise {shlex.join(words)}"]:
        sys.stderr.write(f"[rankwise] {text}\n")
    parser = argparse.ArgumentParser(prog="rankwise run", usage=run.RUN.usage, allow_abbrev=False)
    run.add_options(parser)
    translated = parser.parse_args(words[1:])
    if translated.hosts is None:
        _check_before_ranks_start(_rank_command(options.command))
    return run.execute(translated)


def _check_before_ranks_start(words: Sequence[str]) -> None:
    """Report a mistake in the name of the script or command once, not on every rank."""
    if words[0] == "--no-python":
        find_command(words[1], ())
    elif not words[0].startswith("-"):
        find_script(words[0], ())


def translate(options: argparse.Namespace) -> list[str]:
    """Return the arguments of ``rankwise`` that are equivalent to horovodrun's options.

    Raises:
        ConfigurationError: there are too few slots, or an option has no counterpart.
    """
    command = _rank_command(options.command)
    slots = _slots(options)
    if options.host_discovery_script is not None:
        raise _no_discovery(options, command)
    if options.slots_per_host is not None:
        raise ConfigurationError(
            "--slots-per-host is for a discovery script.", do="write the slots after each host: -H a:4,b:4"
        )
    is_elastic = options.fewest is not None
    num_ranks = _num_ranks(options, slots, is_elastic=is_elastic)
    used = host_list.filled(slots, num_ranks)
    words = ["run"]
    if host_list.are_here(used):
        words += ["-n", str(num_ranks)]
    else:
        words += ["--hosts", ",".join(f"{host}:{number}" for host, number in used), *_network_words(options)]
        if is_elastic and (fewest := _fewest_hosts(used, options.fewest)) < len(used):
            words += ["--nodes", f"{fewest}:{len(used)}"]
    if is_elastic or options.reset_limit is not None:
        words += ["--max-restarts", str(RESTARTS if options.reset_limit is None else options.reset_limit)]
    if options.log_dir is not None:
        words += ["--log-dir", options.log_dir]
    timeline = [] if options.timeline is None else ["--timeline-filename", options.timeline]
    return [*words, "-m", COMPAT, *timeline, *command]


def notes(options: argparse.Namespace) -> list[str]:
    """Return a line for each option that has no effect here, and for what differs slightly."""
    given = dict.fromkeys(options.noted or [])
    said = [f"{name} has no effect: {NOTED[name]}" for name in given]
    for name, why in NOTED_WITH_VALUE.items():
        if getattr(options, f"noted{name}") is not None:
            said.append(f"{name} has no effect: {why}")
    if options.fewest is not None:
        said.append("after a failure all ranks restart, from the newest commit of hvd.elastic's state")
    first = _words_of(options.command)[0]
    asked = shutil.which(first) if is_python(first) else None
    # A virtual environment's interpreter is a link: its location determines which packages it has.
    if asked is not None and Path(asked).parent != Path(sys.executable).parent:
        said.append(f"ranks run under the Python that runs rankwise: {sys.executable}, not {asked}")
    return said


def _words_of(command: Sequence[str]) -> list[str]:
    return list(command[1:] if command[:1] == ["--"] else command)


def _rank_command(command: Sequence[str]) -> list[str]:
    """Return what each rank runs: a script, ``-m`` and a module, or ``--no-python`` and a command, with arguments."""
    words = _words_of(command)
    example = "rankwise horovodrun -np 4 python train.py"
    if not words:
        raise ConfigurationError("There is no command to run.", do=example)
    if not is_python(words[0]):
        return ["--no-python", *words]
    rest = words[1:]
    # Ranks are line-buffered in any case.
    while rest[:1] == ["-u"]:
        rest = rest[1:]
    if not rest:
        raise ConfigurationError("The command has no script.", do=example)
    # Other options are for a Python that is starting: ranks are forks of one that has started.
    return rest if rest[0] == "-m" or not rest[0].startswith("-") else ["--no-python", *words]


def _slots(options: argparse.Namespace) -> Slots:
    """Return the hosts and how many ranks each can run; none if the command names none."""
    if options.hostfile is not None:
        return host_list.read_slots(options.hostfile)
    return [] if options.hosts is None else host_list.parse_slots(options.hosts, "-H ")


def _num_ranks(options: argparse.Namespace, slots: Slots, *, is_elastic: bool) -> int:
    room = sum(number for _, number in slots)
    asked = options.num_ranks
    for name, value in (("-np", asked), ("--min-np", options.fewest), ("--max-np", options.most)):
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} must be >= 1, got {value}.", do=f"pass {name} 1 or more")
    if asked is None and not slots:
        raise ConfigurationError("The number of ranks is not given.", do="pass -np 4, or -H worker-0:2,worker-1:2")
    if slots and asked is not None and asked > room:
        raise ConfigurationError(
            f"-np {asked} asks for more ranks than there are slots: {room}.",
            evidence=", ".join(f"{host}: {number}" for host, number in slots),
            do=f"pass -np {room}, or more slots",
        )
    if options.most is not None and not is_elastic:
        raise ConfigurationError("--max-np is for an elastic job.", do="pass --min-np too, or -np alone")
    # An elastic Horovod job starts with -np ranks, and takes everything there is as soon as it is discovered.
    number = min(options.most or room, room) if is_elastic and slots else asked or room
    if is_elastic and not options.fewest <= number:
        raise ConfigurationError(
            f"--min-np {options.fewest} is more than the {number} ranks that can run.",
            do="pass a smaller --min-np, or more slots",
        )
    return number


def _fewest_hosts(used: Slots, fewest: int) -> int:
    """Return how many hosts, whichever they are, can run ``fewest`` ranks."""
    room = 0
    for number, (_, slots) in enumerate(sorted(used, key=lambda one: one[1]), 1):
        room += slots
        if room >= fewest:
            return number
    return len(used)


def _network_words(options: argparse.Namespace) -> list[str]:
    words: list[str] = []
    ssh = ["ssh"]
    if options.ssh_port is not None:
        ssh += ["-p", str(options.ssh_port)]
    if options.ssh_identity_file is not None:
        ssh += ["-i", options.ssh_identity_file]
    if len(ssh) > 1:
        words += ["--ssh", shlex.join(ssh)]
    interfaces = [name for one in options.interfaces for name in one.split(",")]
    if len(interfaces) > 1:
        raise ConfigurationError(
            f"{len(interfaces)} network interfaces were given, and ranks use one.",
            do=f"pass --network-interface {interfaces[0]}",
        )
    if interfaces:
        words += ["--interface", interfaces[0]]
    if options.start_timeout is not None:
        words += ["--rendezvous-timeout", str(options.start_timeout)]
    return words


def _no_discovery(options: argparse.Namespace, command: Sequence[str]) -> ConfigurationError:
    own = ["-n", str(options.slots_per_host)] if options.slots_per_host else []
    restarts = RESTARTS if options.reset_limit is None else options.reset_limit
    words = [*own, "--max-restarts", str(restarts), "-m", COMPAT, *command]
    return ConfigurationError(
        "--host-discovery-script is not supported: machines join by themselves.",
        do=f"on each machine: rankwise run --nodes 1:4 --rendezvous FIRST_HOST:29400 {shlex.join(words)}",
    )


class _Refuse(argparse.Action):
    """Stops parsing at an option that has no equivalent here."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 - nothing is noted
        values: str | Sequence[object] | None,  # noqa: ARG002 - nor read
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} is not supported: {REFUSED[str(option_string)][1]}")


COMMAND = Command(
    name="horovodrun",
    usage="rankwise horovodrun -np N [options] python train.py [arguments]",
    help="run a Horovod script, with horovodrun's options",
    description="""\
Run a Horovod script, unchanged, on several ranks, with horovodrun's options. `import horovod.torch` imports rankwise's.

Prints the equivalent `rankwise run` command.""",
    epilog="""\
examples:
  rankwise horovodrun -np 4 python train.py --epochs 3
  rankwise horovodrun -np 8 -H gpu-01:4,gpu-02:4 python train.py
  rankwise horovodrun -np 8 --min-np 4 --reset-limit 3 -H gpu-01:4,gpu-02:4 python train.py""",
    add_options=add_options,
    execute=execute,
)
