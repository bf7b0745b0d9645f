# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of one machine and returns the exit code: from a command to running ranks.

Imports torch only when called: before that, a mistake in the command costs nothing. Imported by the
command line.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import socket
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rankwise.errors import ConfigurationError
from rankwise.launch import failure
from rankwise.launch.interrupts import Interrupts, end_quietly
from rankwise.launch.output import Output
from rankwise.launch.server import fork_server
from rankwise.launch.worker import run_rank, threads_per_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.launch.failure import FailedAttempt
    from rankwise.launch.server import WarmServer
    from rankwise.launch.target import Target

MONITOR_SECONDS = 0.001
"""Between two looks of torch elastic's; the look itself waits until something happens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """What can be chosen about a launch on one machine."""

    num_ranks: int | None = None
    """How many ranks; ``None`` starts one per GPU, or one where there is no GPU."""
    device: Literal["auto", "cpu"] = "auto"
    """``"cpu"`` hides the GPUs from the ranks."""
    log_dir: str | None = None
    """A folder that gets ``rank-0.out``, ``rank-0.err`` and so on; made if it is not there."""
    max_restarts: int = 0
    """How often all ranks are started anew after a failure."""

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if self.num_ranks is not None and self.num_ranks < 1:
            raise ConfigurationError(
                f"{self.num_ranks} ranks cannot be started.",
                do="pass -n 1 or more, or leave -n out: one rank per GPU, else one",
            )
        if self.max_restarts < 0:
            raise ConfigurationError(f"max_restarts is {self.max_restarts}.", do="pass 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What has been opened for one launch before its first rank starts."""

    folder: str
    """Temporary, for the failures that ranks write down; the server removes it."""
    server: WarmServer
    doorbell: int
    """Readable when a rank has written down a failure."""
    interrupts: Interrupts


def launch(target: Target, options: LaunchOptions, say: Callable[[str], None]) -> int:
    """Run ``target`` on the ranks of this machine and return the exit code for the shell.

    Args:
        target: what each rank runs, already checked.
        options: how many, where.
        say: shows text to the person; called from this thread.

    Returns:
        0, the first failing rank's exit code (128 and the signal's number for a signal), or 128 and
        the number of the signal that ended the launcher.

    Raises:
        ConfigurationError: more ranks than GPUs, or the log folder cannot be used. No rank started.
        LaunchError: a rank could not be started.
    """
    end_quietly()
    if options.log_dir is not None:
        _make_folder(options.log_dir)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # For the fork below to have it: one import serves the launcher and every rank.
    importlib.import_module("torch")

    folder = tempfile.mkdtemp(prefix="rankwise-")
    doorbell_r, doorbell_w = os.pipe()
    server = fork_server(partial(run_rank, target=target, doorbell=doorbell_w), folder=folder, doorbell=doorbell_r)
    os.close(doorbell_w)
    try:
        job = _Job(folder=folder, server=server, doorbell=doorbell_r, interrupts=Interrupts())
        return _supervise(job, target, options, say)
    finally:
        server.close()


def num_ranks_here(options: LaunchOptions, num_gpus: int) -> int:
    """Return how many ranks to start on a machine with ``num_gpus`` GPUs.

    Raises:
        ConfigurationError: there are GPUs, and more ranks than GPUs.
    """
    if options.num_ranks is None:
        return max(1, num_gpus)
    if 0 < num_gpus < options.num_ranks:
        gpus = "GPU" if num_gpus == 1 else "GPUs"
        raise ConfigurationError(
            f"{options.num_ranks} ranks were asked for on a machine with {num_gpus} {gpus}.",
            do=f"pass -n {num_gpus}, or --device cpu to run the ranks without GPUs",
        )
    return options.num_ranks


def _supervise(job: _Job, target: Target, options: LaunchOptions, say: Callable[[str], None]) -> int:
    # Torch's agent, while the server already imports what the ranks need.
    import torch.cuda  # noqa: PLC0415
    from torch.distributed.elastic.agent.server.api import WorkerSpec  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415

    from rankwise.launch.agent import LocalAgent  # noqa: PLC0415
    from rankwise.launch.local import LocalRendezvous  # noqa: PLC0415

    # Only now: asking for GPUs before the fork could leave the ranks unable to use them.
    num_ranks = num_ranks_here(options, torch.cuda.device_count())
    # Whatever torch elastic would log is told here, once and in our words.
    logging.getLogger("torch.distributed.elastic.agent.server.api").disabled = True
    output = Output(num_ranks, options.log_dir)
    rendezvous = LocalRendezvous(run_id=secrets.token_hex(8))
    spec = WorkerSpec(
        role="default",
        local_world_size=num_ranks,
        rdzv_handler=rendezvous,
        entrypoint=str(target),
        max_restarts=options.max_restarts,
        monitor_interval=MONITOR_SECONDS,
    )
    agent = LocalAgent(
        spec,
        rendezvous=rendezvous,
        server=job.server,
        output=output,
        interrupts=job.interrupts,
        error_folder=job.folder,
        doorbell=job.doorbell,
        on_failed_attempt=partial(_say_failed_attempt, options, output, say),
    )
    say(_decision(num_ranks))
    try:
        failed = agent.supervise()
    except SignalException as stopped:
        output.drain()
        say(f"[rankwise] {stopped.sigval.name}: every rank has been ended\n")
        return 128 + stopped.sigval
    finally:
        output.drain()
        output.close()
    return failure.shell_code(failed.first.exit_code) if failed is not None else 0


def _say_failed_attempt(
    options: LaunchOptions, output: Output, say: Callable[[str], None], failed: FailedAttempt
) -> None:
    output.drain()
    for each in failed.failures:
        output.append_to_log(each.rank, failed.attempt, each.traceback)
    rank = failed.first.rank
    say(
        failure.report(
            failed,
            hostname=socket.gethostname(),
            stderr_tail=output.stderr_tail(rank),
            log_path=output.log_path(rank, failed.attempt),
        )
    )
    if failed.attempt < options.max_restarts:
        say(f"[rankwise] restart {failed.attempt + 1} of {options.max_restarts}\n")


def _decision(num_ranks: int) -> str:
    threads = threads_per_rank(num_ranks, os.environ.get("OMP_NUM_THREADS"))
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    each = f"{threads} CPU thread" if threads == 1 else f"{threads} CPU threads"
    return f"[rankwise] {ranks} on this machine, {each}{'' if num_ranks == 1 else ' each'}\n"


def _make_folder(log_dir: str) -> None:
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=log_dir):
            pass
    except OSError as error:
        raise ConfigurationError(f"The log folder {log_dir!r} cannot be written to: {error.strerror}.") from error
