# SPDX-License-Identifier: Apache-2.0
"""Starts this machine's part of a job and returns the exit code: from a command to running ranks.

Imports torch only when called, so that a mistake in the command is reported immediately. Imported by the command line
and by ``function``.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rankwise.errors import ConfigurationError
from rankwise.launch.agent.output import Output
from rankwise.launch.agent.signals import PendingSignals, end_quietly
from rankwise.launch.fork_server.entrypoint import Script
from rankwise.launch.fork_server.fork_server import fork_server
from rankwise.launch.fork_server.worker import run_rank, threads_per_rank
from rankwise.launch.inspect.control_socket import ControlSocket
from rankwise.launch.messages import Hello, Node
from rankwise.launch.options import LaunchOptions
from rankwise.launch.rendezvous import find
from rankwise.store.wire import close_in_children
from rankwise.version import VERSION
from rankwise.world.device.kinds import EXAMPLE, HIDES_GPUS
from rankwise.world.environments.process import device_mask, in_kubernetes, nodes_of_job, read_launcher
from rankwise.world.processes import die_with_parent, make_temporary_folder, remove_temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rankwise.launch.controller.link import AgentLink
    from rankwise.launch.controller.server import JobServer
    from rankwise.launch.fork_server.entrypoint import Target
    from rankwise.launch.fork_server.fork_server import ForkServer
    from rankwise.launch.rendezvous import JobAddress
    from rankwise.launch.report.failure_report import Reporter
    from rankwise.world.device.kinds import DeviceKind

__all__ = ["LaunchOptions", "launch", "num_ranks_here"]

DEVICE_NAME = "RANKWISE_DEVICE"
"""Sets which device ranks use; read by ``environments``."""
IN_SLURM = "SLURM_JOB_ID"
"""If this is set, SIGTERM is Slurm's notice before a preemption or ``scancel``, with time left to save."""


def launch(target: Target, options: LaunchOptions, reporter: Reporter, job_address: JobAddress | None = None) -> int:
    """Run ``target`` on the ranks of this machine, with those of other machines if there are any.

    Args:
        target: what each rank runs, already checked.
        options: how many ranks, and where.
        reporter: shows the reports.
        job_address: where the machines meet, if already arranged; ``options`` agrees with it.

    Returns:
        0, the first failing rank's exit code (128 plus the signal's number for a signal), 75 if the ranks saved
        and stopped because they were asked to, or 128 plus the number of the signal that ended the launcher.

    Raises:
        ConfigurationError: more ranks than devices, the log folder or the rendezvous cannot be used, another machine
            runs something else. No rank was started.
        LaunchError: a rank could not be started, or the other machines cannot be reached.
    """
    if job_address is None:
        options = _with_scheduler(options)
    end_quietly()
    _open_standard_streams()
    if options.log_dir is not None:
        _make_folder(options.log_dir)
    if os.environ.get(DEVICE_NAME) == "cpu":
        options = replace(options, device="cpu")
    if options.device == "cpu":
        os.environ.update({DEVICE_NAME: options.device, **HIDES_GPUS})
    # Before torch is imported, which takes seconds on a busy machine: the others see that this one has started.
    job = find(options) if job_address is None else job_address
    if job.listener is not None:
        close_in_children(job.listener)
    # Objects created by imports live as long as the process: collecting garbage among them only takes time.
    gc.disable()
    # Before the fork below: one import serves the launcher and every rank.
    with _announced(job, options):
        importlib.import_module("torch")

    folder = str(make_temporary_folder())
    # Readable when a rank has recorded a failure.
    notify_read_end, notify_write_end = os.pipe()
    # A rank also returns through here: code around this call runs once in each of them.
    server = fork_server(
        partial(run_rank, target=target, notify_pipe=notify_write_end),
        names=target.names,
        folder=folder,
        notify_pipe=notify_read_end,
        expects_restarts=options.can_restart,
    )
    os.close(notify_write_end)
    try:
        return _take_part(target, options, reporter, job, folder=folder, server=server, notify_pipe=notify_read_end)
    finally:
        server.close()
        if job.listener is not None:
            job.listener.close()
        # Done by the server, unless it was killed.
        remove_temporary_folder(Path(folder))


def _unused_nodes() -> str:
    """Return a warning if this launcher is in a Slurm job of several nodes and uses only one; else an empty text."""
    number = nodes_of_job()
    if number < 2:  # noqa: PLR2004 - a job of one node leaves none unused
        return ""
    return (
        f"[rankwise] this Slurm job has {number} nodes, but this launcher uses only one; to use all: "
        "srun --ntasks-per-node=1 rankwise run ...\n"
    )


def _with_scheduler(options: LaunchOptions) -> LaunchOptions:
    """Return ``options`` with the machines of a scheduler that has started one launcher on each, as variables show."""
    if options.nodes[1] > 1 or options.rendezvous is not None:
        return options
    reading = read_launcher()
    if reading is None:
        return options
    size = reading.world_size
    if (reading.local_world_size or 1) > 1 or (reading.num_nodes or size) < size:
        raise ConfigurationError(
            f"{reading.local_world_size or 'Several'} launchers were started on this machine, but one is enough.",
            evidence=reading.reason,
            do="start one per machine, as with srun --ntasks-per-node=1 rankwise run -n RANKS_PER_NODE train.py\n"
            "or start the ranks themselves, as with srun python train.py\n"
            "or set RANKWISE_ALONE=1, if each launcher starts a job of its own",
        )
    if options.num_ranks is None and reading.ranks_to_start > 1:
        options = replace(options, num_ranks=reading.ranks_to_start)
    if size == 1:
        return options
    return replace(
        options, nodes=(size, size), node_rank=reading.rank, rendezvous=reading.address, told_by_scheduler=True
    )


def _open_standard_streams() -> None:
    """Open the standard streams that the caller closed: other files would get their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004 - stderr
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - as above


def num_ranks_here(options: LaunchOptions, num_gpus: int, kind: DeviceKind | None = None) -> int:
    """Return how many ranks to start on a machine with ``num_gpus`` devices, one per rank.

    Raises:
        ConfigurationError: there are devices, and more ranks than devices.
    """
    if options.num_ranks is None:
        return max(1, num_gpus)
    if 0 < num_gpus < options.num_ranks:
        title = (kind or EXAMPLE).title
        raise ConfigurationError(
            f"{options.num_ranks} ranks were requested on a machine with {num_gpus} {title}{'s' * (num_gpus > 1)}.",
            do=f"pass -n {num_gpus}, or --device cpu to run the ranks without {title}s",
        )
    return options.num_ranks


def _take_part(
    target: Target,
    options: LaunchOptions,
    reporter: Reporter,
    job: JobAddress,
    *,
    folder: str,
    server: ForkServer,
    notify_pipe: int,
) -> int:
    started = time.monotonic()
    signals = PendingSignals()
    # While the server is importing what the ranks need.
    from rankwise.launch.agent.agent import Agent  # noqa: PLC0415
    from rankwise.launch.agent.inspection import InspectService  # noqa: PLC0415
    from rankwise.launch.agent.ranks import LocalRanks  # noqa: PLC0415

    num_ranks, instances = _ranks_here(options)
    output = Output(options.log_dir, controller=options.controller)
    with ExitStack() as closing:
        job_server = None if job.listener is None else _serve(job, job.listener, options)
        if job_server is not None:
            closing.callback(job_server.close)
        closing.callback(output.close)
        closing.callback(output.drain)
        ranks = LocalRanks(
            num_ranks,
            job,
            options,
            folder=folder,
            server=server,
            output=output,
            notify_pipe=notify_pipe,
            instances=instances,
        )
        hello = _hello(target, options, num_ranks, serves=job_server is not None)
        control_socket = closing.enter_context(ControlSocket(folder, ranks=list(range(num_ranks))))
        agent = Agent(
            ranks,
            open_link=partial(_connect, job, job_server, hello, show=reporter.show),
            signals=signals,
            inspection=InspectService(control_socket, ranks),
            reporter=reporter,
            hosts_job=job_server is not None,
            options=options,
            saves_on_terminate=IN_SLURM in os.environ or in_kubernetes(),
            passes_terminate_on=in_kubernetes(),
        )
        reporter.show(_decision(options, num_ranks) + job.notice + _local_rank_notice(target))
        if options.nodes[1] == 1:
            reporter.show(_unused_nodes())
        exit_code = agent.run(options.rendezvous_timeout_seconds)
        if exit_code == 0 and num_ranks > 1 and options.nodes[1] == 1 and not ranks.failures:
            output.say(f"{num_ranks} ranks finished in {_duration(time.monotonic() - started)}")
        reporter.end(ranks.failures)
        return exit_code


@contextmanager
def _announced(job: JobAddress, options: LaunchOptions) -> Generator[None]:
    """Have a machine that serves the job know inside the block that this one has started: it may wait for its return.

    In a process of its own, for at most as long as the block: the network must not delay a start, and the launcher may
    have no threads.
    """
    pid, launcher = None, os.getpid()
    if job.listener is None and options.can_restart:
        with suppress(OSError):
            pid = os.fork()
    if pid == 0:
        _announce(job, launcher)
    try:
        yield
    finally:
        # Where this process was started with SIGCHLD ignored, the system removes a process that has exited.
        if pid is not None:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _announce(job: JobAddress, launcher: int) -> NoReturn:
    try:
        die_with_parent()
        from rankwise.launch.controller.link import announce  # noqa: PLC0415

        if os.getppid() == launcher:
            announce(job.address, job.secret.encode())
    finally:
        os._exit(0)


def _connect(
    job: JobAddress,
    job_server: JobServer | None,
    hello: Hello,
    timeout_seconds: float,
    between: Callable[[], None],
    *,
    show: Callable[[str], None],
) -> AgentLink:
    """Return a link to the job's controller, in this process or over the network."""
    between()
    if job_server is not None:
        return job_server.connect(hello)
    from rankwise.launch.controller.link import open_link  # noqa: PLC0415

    return open_link(
        job.address,
        job.secret.encode(),
        hello,
        timeout_seconds=timeout_seconds,
        between=between,
        show=show,
    )


def _ranks_here(options: LaunchOptions) -> tuple[int, tuple[str, ...]]:
    """Return the number of ranks on this machine, and the MIG instances that they use, if it has some."""
    from rankwise.world.device import accelerator  # noqa: PLC0415

    # Only after the fork: querying devices before it could leave the ranks unable to use them.
    kind = None if options.device == "cpu" else accelerator.found_kind()
    instances = accelerator.mig_instances(device_mask(EXAMPLE.visible)) if kind is EXAMPLE else ()
    num_devices = len(instances) or (accelerator.count() if kind and not kind.is_shared else 0)
    return num_ranks_here(options, num_devices, kind), instances


def _serve(job: JobAddress, listener: socket.socket, options: LaunchOptions) -> JobServer:
    """Serve the job's store and its coordinator, until it is closed."""
    from rankwise.launch.controller.coordinator import Coordinator  # noqa: PLC0415
    from rankwise.launch.controller.server import GARBAGE_THRESHOLDS, JobServer, TorchStores  # noqa: PLC0415

    gc.set_threshold(*GARBAGE_THRESHOLDS)  # ranks are forked from another process
    host, port = job.address
    coordinator = Coordinator(
        nodes=options.nodes,
        max_restarts=options.max_restarts,
        rendezvous=f"{host}:{port}",
        timeout_seconds=options.rendezvous_timeout_seconds,
        now=time.monotonic(),
        run_id=secrets.token_hex(8),
    )
    stores = TorchStores(listener.getsockname()[0], host, options.torch_store, on_one_machine=options.nodes[1] == 1)
    return JobServer(listener, job.secret.encode(), coordinator, stores)


def _hello(target: Target, options: LaunchOptions, num_ranks: int, *, serves: bool) -> Hello:
    import torch  # noqa: PLC0415

    words, arguments = str(target), getattr(target, "arguments", ())
    if isinstance(target, Script):
        digest = hashlib.sha256(Path(target.path).read_bytes()).hexdigest()
        words = f"{Path(target.path).name} ({digest[:12]})"
    asked = f"--nodes {options.nodes[0]}:{options.nodes[1]} --max-restarts {options.max_restarts}"
    if options.torch_store != "auto":
        asked += f" --torch-store {options.torch_store}"
    same = {
        "script": words,
        "options": asked,
        # Only a digest: they may be long or private.
        "arguments": f"{len(arguments)} ({hashlib.sha256(json.dumps(arguments).encode()).hexdigest()[:8]})",
        "rankwise": VERSION,
        "torch": str(torch.__version__),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    node = Node(
        node_id=uuid.uuid4().hex,
        hostname=socket.gethostname(),
        num_ranks=num_ranks,
        node_rank=options.node_rank,
        serves=serves,
        job=same,
    )
    return Hello(node=node)


def _decision(options: LaunchOptions, num_ranks: int) -> str:
    if options.num_ranks == 1 and options.nodes[1] == 1:
        return ""  # Nothing was decided: the same runs as under `python`.
    threads = threads_per_rank(num_ranks, os.environ.get("OMP_NUM_THREADS"))
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    each = f"{threads} CPU thread" if threads == 1 else f"{threads} CPU threads"
    return f"[rankwise] {ranks} on this machine, {each}{'' if num_ranks == 1 else ' each'}\n"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _local_rank_notice(target: Target) -> str:
    option = getattr(target, "local_rank_option", None)
    return "" if option is None else f"[rankwise] {target} accepts {option}: each rank is passed its own\n"


def _make_folder(log_dir: str) -> None:
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=log_dir):
            pass
    except OSError as error:
        raise ConfigurationError(f"The log folder {log_dir!r} cannot be written to: {error.strerror}.") from error
