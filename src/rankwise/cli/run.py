# SPDX-License-Identifier: Apache-2.0
"""``rankwise run`` and ``rankwise submit``: a script on several ranks, from here or as a job of Slurm or Kubernetes.

Their options and how they are translated. Starts nothing, writes no script and calls neither scheduler itself.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.auto.script import AutoScript
from rankwise.cli.arguments import (
    Command,
    add_command,
    add_option,
    misplaced_options,
    refuse_misplaced_count,
    values_of,
)
from rankwise.errors import ConfigurationError
from rankwise.launch import kubernetes
from rankwise.launch.fork_server.entrypoint import find_target
from rankwise.launch.job_size import SAVE_SECONDS
from rankwise.launch.messages import RemoteCommand
from rankwise.launch.options import LaunchOptions
from rankwise.launch.report.failure_report import RecordingReporter, TerminalReporter
from rankwise.launch.slurm import JobOptions, batch_script, follow, submit
from rankwise.launch.start import launch
from rankwise.log import WARNING, YELLOW, colored
from rankwise.world.environments.process import REPORT_OFF, asked_report, asked_torch_store
from rankwise.world.environments.reading import parse_address

if TYPE_CHECKING:
    from rankwise.launch.report.failure_report import Reporter

ANY_CLUSTER = "auto"
"""In place of the address of a cluster of Ray: the one that this machine belongs to."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell reports it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = partial(add_option, parser.add_argument, LaunchOptions)
    add("num_ranks", "number of ranks (default: one per GPU, else one)", flag="-n", metavar="N", type=_count)
    add("device", "cpu hides the GPUs from the ranks (default: auto, one GPU per rank if there are GPUs)")
    add("log_dir", "write DIR/rank-0.out, DIR/rank-0.err and so on", metavar="DIR")
    add("max_restarts", "restart all ranks after a failure, at most R times (default: 0)", metavar="R")
    add("check", "have ranks compare their collectives, including gradients, before they send (RANKWISE_CHECK=1)")
    add(
        "guard",
        "have the ranks of a torch.distributed script compare parameters and learning rates during training",
    )
    add(
        "controller",
        "run an unedited script for one device on rank 0; each rank computes its models for a part of each batch",
        flag="--auto",
    )
    add(
        "report",
        "record in DIR where the time of each step goes, for `rankwise report DIR`; off measures nothing "
        "(RANKWISE_REPORT)",
        metavar="DIR | off",
    )
    add(
        "progress",
        "show one line about the whole job, on the machine with rank 0: its pace, the values it logs, the slowest rank",
    )
    add(
        "torch_store",
        "whether MASTER_ADDR and MASTER_PORT point to torch's own store, which accepts every process that reaches "
        "it (default: RANKWISE_TORCH_STORE, else, on one machine, a store for processes of this user)",
        choices=("on", "off"),
        default=None,
    )
    _add_options_of_machines(parser)
    add_command(parser)


def _add_options_of_machines(parser: argparse.ArgumentParser) -> None:
    machines = parser.add_argument_group("several machines")
    add = partial(add_option, machines.add_argument, LaunchOptions)
    add(
        "nodes",
        "number of machines; with MIN:MAX the job continues if some are lost and grows when they rejoin",
        metavar="N | MIN:MAX",
        type=_nodes,
        default=None,
    )
    add(
        "rendezvous",
        "where the machines meet: an address of the first machine, the same on all",
        metavar="HOST:PORT",
        type=_address,
    )
    add("node_rank", "number of this machine (default: in the order they join)", metavar="R")
    machines.add_argument(
        "--hosts",
        metavar="A,B:RANKS,...",
        type=_hosts,
        help="start all machines from here, over ssh; the first one serves the job",
    )
    machines.add_argument(
        "--ssh",
        default="ssh",
        metavar="COMMAND",
        help="the ssh command for --hosts, with its options (default: ssh)",
    )
    machines.add_argument(
        "--ray",
        nargs="?",
        const=ANY_CLUSTER,
        type=_cluster,
        metavar="HOST:PORT",
        help="start all ranks from here, on a cluster of Ray (default: the one of this machine); -n then counts all "
        "ranks, and --nodes the nodes they are divided among (default: as few as hold them)",
    )
    machines.add_argument(
        "--cpus-per-rank",
        type=_count,
        metavar="N",
        help="CPUs that Ray reserves for each rank (default: 1); with a GPU if the cluster has some",
    )
    add(
        "interface",
        "network interface for traffic between ranks (default: the one that leads to the rendezvous)",
        metavar="NAME",
    )
    add(
        "rendezvous_timeout_seconds",
        "how long the machines wait for one another at the start (default: 600)",
        flag="--rendezvous-timeout",
        metavar="SECONDS",
    )


def execute(options: argparse.Namespace) -> int:
    """Check the command, run it, and return the exit code, or end this process with it."""
    hosts = f" --hosts {options.hosts}" if options.hosts is not None else ""
    refuse_misplaced_count(options, f"rankwise run{hosts}", "-n", options.num_ranks)
    if hint := misplaced_options(options):
        sys.stderr.write(f"{colored(WARNING, YELLOW, is_terminal=sys.stderr.isatty())} {hint}")
    if options.ray is None and options.cpus_per_rank is not None:
        raise ConfigurationError("--cpus-per-rank is for --ray.", do="add --ray, or set OMP_NUM_THREADS instead")
    if options.ray is not None:
        return _execute_on_ray(options)
    if options.hosts is not None:
        return _execute_on_hosts(options)
    launch_options = _launch_options(options, options.nodes or (1, 1))
    target = find_target(options.target, options.arguments, is_module=options.module)
    reporter = _reporter(launch_options.report)
    exit_code = launch(AutoScript(target) if options.controller else target, launch_options, reporter)
    # Every rank has exited and everything is reported: Python's own shutdown, torch first, would only take longer.
    os._exit(exit_code)


def _execute_on_hosts(options: argparse.Namespace) -> int:
    # Imported only where ssh is used.
    from rankwise.launch.hosts.host_list import parse_hosts  # noqa: PLC0415
    from rankwise.launch.hosts.ssh import launch_on_hosts, split_command  # noqa: PLC0415

    _refuse_one_per_machine(options, "--hosts", "the hosts meet at the first one, and are numbered in the order given")
    hosts, ssh = parse_hosts(options.hosts), split_command(options.ssh)
    own = _launch_options(options, (1, 1))
    show = _reporter(own.report).show
    return launch_on_hosts(_remote_command(options), hosts, own, nodes=options.nodes, ssh=ssh, show=show)


def _execute_on_ray(options: argparse.Namespace) -> int:
    # Imported only where Ray is used.
    from rankwise.launch.function.call import CallerContext  # noqa: PLC0415
    from rankwise.launch.hosts.on_ray import launch_on_ray  # noqa: PLC0415
    from rankwise.launch.hosts.ray_cluster import RayNeeds  # noqa: PLC0415

    _refuse_one_per_machine(options, "--ray", "the nodes meet here, and are numbered in the order Ray has them")
    if options.hosts is not None:
        raise ConfigurationError("--hosts and --ray both say where the ranks run.", do="pass one of them")
    find_target(options.target, options.arguments, is_module=options.module)
    own = _launch_options(options, (1, 1))
    context = CallerContext(
        name=options.target,
        options=own,
        names=frozenset(),
        argv=[],
        path=[],
        sources={},
        command=_remote_command(options),
    )
    needs = RayNeeds(address=options.ray, nodes=options.nodes, cpus_per_rank=options.cpus_per_rank or 1)
    return launch_on_ray(context, b"", needs, _reporter(own.report), takes_signals=True).exit_code


def _refuse_one_per_machine(options: argparse.Namespace, given: str, how: str) -> None:
    for name, value in (("--rendezvous", options.rendezvous), ("--node-rank", options.node_rank)):
        if value is not None:
            raise ConfigurationError(
                f"{name} is for one command per machine, and {given} is one command for all.",
                do=f"leave {name} out: {how}",
            )


def _remote_command(options: argparse.Namespace) -> RemoteCommand:
    if options.controller:
        words = (*(("-m",) if options.module else ()), options.target, *options.arguments)
        return RemoteCommand(target="rankwise.auto", is_module=True, arguments=words)
    return RemoteCommand(target=options.target, is_module=options.module, arguments=tuple(options.arguments))


def _launch_options(options: argparse.Namespace, nodes: tuple[int, int]) -> LaunchOptions:
    return values_of(
        LaunchOptions,
        options,
        nodes=nodes,
        torch_store=options.torch_store or asked_torch_store(),
        report=_report_folder(options.report or asked_report()),
    )


def _report_folder(given: str) -> str | None:
    """Return the folder for records as an absolute path; it is created before any rank starts.

    Raises:
        ConfigurationError: it cannot be created.
    """
    if given in {"", REPORT_OFF}:
        return given or None
    folder = Path(given).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"The folder of the report, {folder}, cannot be created: {error.strerror}.", do="pass another folder"
        ) from error
    return str(folder)


def _reporter(report: str | None) -> Reporter:
    shown = TerminalReporter()
    return shown if report is None or report == REPORT_OFF else RecordingReporter(shown, report)


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        # `-np 4` is read as `-n p`.
        do = "; use -n in place of mpirun's -np" if text == "p" else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a number{do}") from None


def _nodes(text: str) -> tuple[int, int]:
    fewest, colon, most = text.partition(":")
    if not fewest.isdecimal() or not (most.isdecimal() or not colon):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor MIN:MAX, such as 2 or 1:4")
    return int(fewest), int(most or fewest)


def _hosts(text: str) -> str:
    if os.path.isfile(text):  # noqa: PTH113 - False for names that no file can have, as of many hosts
        raise argparse.ArgumentTypeError(f"{text!r} is a script, not a host; write --hosts gpu-01,gpu-02 {text}")
    return text


def _cluster(text: str) -> str:
    if text != ANY_CLUSTER and ":" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no address; before a script, write --ray={ANY_CLUSTER}")
    return text


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text, "--rendezvous")
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error.what)) from error


RUN = Command(
    name="run",
    usage="rankwise run [options] script.py [arguments]\n       rankwise run [options] -m module [arguments]",
    help="run a script on several ranks",
    description="""\
Run a training script or a module on several ranks, on this machine or on several machines.

Each rank is a separate process, which behaves as under `python script.py arguments`.
The exit code is that of the first rank to fail; its traceback is shown last.""",
    epilog="""\
examples:
  rankwise run train.py                  every GPU here, or one rank on a machine without GPUs
  rankwise run -n 4 train.py --epochs 3  four ranks; arguments after the script belong to it
  rankwise run -n 2 -m pkg.train         a module, as `python -m pkg.train` runs it
  rankwise run --nodes 2 --rendezvous gpu-01:29400 train.py
                                         the same command on each of two machines
  rankwise run --hosts gpu-01,gpu-02 -n 4 train.py
                                         once for both machines: started over ssh
  rankwise run --ray -n 16 train.py      16 ranks on the cluster of Ray that this machine belongs to
  srun rankwise run -n 4 train.py        under Slurm: one launcher per node, four ranks each

output of the ranks:
  Lines on stdout are passed through unchanged, lines on stderr are prefixed with the rank
  (with --auto, those of the script are not).
  With one rank, nothing is changed. Rank 0 writes to a terminal directly: progress bars work.
  With --log-dir, the terminal shows rank 0 only, and every rank has its own files.
  stdin is empty if there are several ranks.""",
    add_options=add_options,
    execute=execute,
)


# -- rankwise submit -----------------------------------------------------------------------------------------


def _add_submit_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = partial(add_option, parser.add_argument, JobOptions)
    add("nodes", "number of machines (default: 1)", metavar="N")
    add("ranks_per_node", "ranks on each machine (default: one per GPU, else one)", metavar="N")
    add("gpus_per_node", "GPUs on each machine (default: 0)", metavar="N")
    add("cpus_per_rank", "CPU cores for each rank (default: 1)", metavar="N")
    add("job_name", "name of the job (default: the name of the script)", metavar="NAME", default=None)
    add(
        "save_seconds",
        "notify the ranks to save this long before the time limit, or before an evicted pod is killed; 0: never "
        f"(default: {SAVE_SECONDS})",
        metavar="S",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script or manifest and submit nothing")
    add = partial(add_option, parser.add_argument_group("Slurm").add_argument, JobOptions)
    add("time", "time limit, in sbatch's format: 2:00:00, 1-12 (days-hours)", metavar="LIMIT")
    add("partition", "partition to run in", metavar="NAME")
    add("account", "account to charge", metavar="NAME")
    add("output", "the job's log (default: NAME-%%j.log; %%j is its number)", metavar="FILE")
    add(
        "more",
        "another option of sbatch, as --sbatch=--qos=high; may be repeated",
        flag="--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
    )
    group = parser.add_argument_group("Kubernetes")
    group.add_argument("--kubernetes", action="store_true", help="create a job on Kubernetes, with kubectl")
    add = partial(add_option, group.add_argument, kubernetes.KubernetesOptions, default=None)
    add("kind", "a plain indexed Job, a JobSet, or a TrainJob of Kubeflow (default: job)")
    add("image", "container image with Python, rankwise and the script", metavar="NAME")
    add("claim", "a volume claim, and where each pod mounts it, such as runs:/work/runs", metavar="NAME:/PATH")
    add_command(parser)


ONLY_SLURM = ("time", "partition", "account", "output", "more")
ONLY_KUBERNETES = ("kind", "image", "claim")


def _submit(options: argparse.Namespace) -> int:
    """Check the command, submit it, and return the exit code."""
    # Now rather than when the job starts, perhaps an hour later.
    refuse_misplaced_count(options, "rankwise submit", "--ranks-per-node", options.ranks_per_node)
    name, others = ("Kubernetes", ONLY_SLURM) if options.kubernetes else ("Slurm", ONLY_KUBERNETES)
    for option in others:
        if getattr(options, option):
            raise ConfigurationError(
                f"--{'sbatch' if option == 'more' else option} is not an option of a job on {name}.",
                do="remove it" if options.kubernetes else "remove it, or add --kubernetes",
            )
    dashes = ["--"] if options.target.startswith("-") else []
    words = [*(["-m"] if options.module else []), *dashes, options.target, *options.arguments]
    name = options.target.rpartition(".")[2] if options.module else Path(options.target).stem
    return (_submit_to_kubernetes if options.kubernetes else _submit_to_slurm)(options, name, words)


def _submit_to_slurm(options: argparse.Namespace, name: str, words: list[str]) -> int:
    """Submit a job, follow it, and return its exit code."""
    find_target(options.target, options.arguments, is_module=options.module)
    job = values_of(JobOptions, options, job_name=options.job_name or name)
    script = batch_script(job, sys.executable, words)
    if options.dry_run:
        sys.stdout.write(script)
        return 0
    job_id = submit(script)
    sys.stderr.write(f"[rankwise] job {job_id} has been submitted\n")
    if job.is_array:
        sys.stderr.write(f"[rankwise] it is an array, whose jobs have a log each; to see them: squeue -j {job_id}\n")
        return 0
    try:
        return follow(job_id, _show_job)
    except KeyboardInterrupt:
        sys.stderr.write(f"\n[rankwise] job {job_id} continues; to cancel it: scancel {job_id}\n")
        return INTERRUPTED


def _submit_to_kubernetes(options: argparse.Namespace, name: str, words: list[str]) -> int:
    """Create a job, or print its manifest. Its script is in the image, and need not be here."""
    if options.image is None:
        raise ConfigurationError(
            "--kubernetes needs the container image to run.", do="pass --image registry.example.org/train:1"
        )
    job_name = options.job_name or re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    job = values_of(kubernetes.KubernetesOptions, options, job_name=job_name, kind=options.kind or "job")
    if options.dry_run:
        sys.stdout.write(kubernetes.manifest_text(job, words))
        return 0
    sys.stdout.write(kubernetes.submit(job, words))
    sys.stderr.write(kubernetes.next_commands(job))
    return 0


def _show_job(text: str) -> None:
    # The log has both output streams of the ranks, in one order.
    sys.stdout.write(text)
    sys.stdout.flush()


SUBMIT = Command(
    name="submit",
    usage="rankwise submit [options] script.py [arguments]\n       rankwise submit [options] -m module [arguments]",
    help="run a script as a job of Slurm or Kubernetes",
    description="""\
Run a training script or a module as a Slurm job, and show its output until it ends; or create a job on Kubernetes.

Before the time limit, and if the job is preempted or a pod is evicted, the ranks save and stop at one step that all
agree on, and the job is started again; it then continues with the next step. This needs a rankwise.Checkpointer that
was given the rankwise.DataLoader of the loop. Ctrl-C stops the output, not the job. The exit code is that of the job;
with --kubernetes the command ends when the job has been created.""",
    epilog="""\
examples:
  rankwise submit --nodes 8 --gpus-per-node 4 --time 12:00:00 train.py --lr 0.1
  rankwise submit --nodes 2 --ranks-per-node 16 --partition cpu -m pkg.train
  rankwise submit --nodes 8 --time 1-0 --sbatch=--qos=high --dry-run train.py   show the script only
  rankwise submit --kubernetes --image registry.example.org/train:1 --nodes 8 --gpus-per-node 4 train.py""",
    add_options=_add_submit_options,
    execute=_submit,
)
