# SPDX-License-Identifier: Apache-2.0
"""Opens and closes the measurements of this rank: into which file, and with which facts about it.

Called by ``join`` and ``leave``. Waits for no other rank.
"""

from __future__ import annotations

import atexit
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rankwise import meter
from rankwise.comm import step_hooks
from rankwise.errors import ConfigurationError
from rankwise.insight.clock_offset import note_clock
from rankwise.insight.device_times import DeviceTimes
from rankwise.insight.slow_rank import SlowRank
from rankwise.insight.step_meter import StepMeter, StepRecorder
from rankwise.insight.step_record import RecordFile
from rankwise.log import warn
from rankwise.meter import DATA, EVALUATION, record_path
from rankwise.torch_private.processes import wrap_next
from rankwise.version import VERSION
from rankwise.world.device import accelerator
from rankwise.world.device.streams import timing_events
from rankwise.world.environments.process import (
    REPORT_OFF,
    asked_report,
    job_of_process,
    launcher,
    read_process,
    stack_file,
)
from rankwise.world.facts import World

if TYPE_CHECKING:
    from rankwise.comm.session import Session

UNJOINED = "unknown"
"""The backend of a rank that has not joined."""
_PAGE_BYTES = resource.getpagesize()


def start(world: World, report: str | os.PathLike[str] | None) -> None:
    """Measure the steps of this rank from now on. Waits for no other rank.

    Args:
        world: of this rank.
        report: the folder for the record, ``"off"``, or ``None`` for what the launcher was given, whose ``"off"``
            counts in any case.

    Raises:
        ConfigurationError: the folder cannot be created.
    """
    asked = asked_report()
    folder = asked if report is None or asked == REPORT_OFF else os.fspath(report)
    if folder == REPORT_OFF:
        return
    new_event = timing_events(torch.device(world.device))
    times = "host" if new_event is None else "device"
    try:
        record = RecordFile(_path(folder, world.rank), {**facts_of(world), "times": times})
    except OSError as error:
        if folder:
            raise ConfigurationError(
                f"The folder of the report, {folder}, cannot be written: {error.strerror}.",
                do="pass another folder to --report or rankwise.join(report=...)",
            ) from error
        warn(f"steps are not measured, because of their record: {error.strerror}")
        return
    meter.stop()
    device_times = None if new_event is None else DeviceTimes(new_event)
    # In memory it has, of its accelerator, else of the host.
    memory_bytes = accelerator.memory_reader(world.device) or _resident_bytes
    recorder = StepRecorder(record, memory_bytes, Path(folder) if folder else None, device_times)
    step_hooks.install()
    leave_loaders = wrap_next(_measuring_data)

    def leave_to_torch() -> None:
        leave_loaders()
        step_hooks.uninstall()

    meter.start(StepMeter(recorder, leave_to_torch))


def follow(session: Session, hostnames: Sequence[str]) -> None:
    """Record the collectives of a rank that has joined, and how far its clock is ahead of rank zero's.

    Called by: join, on every rank, after :func:`start`. The first rank of each host but rank zero's exchanges a few
    messages with rank zero if the run was given the folder of a report.
    """
    measuring = meter.current
    if not isinstance(measuring, StepMeter) or session.detector is None or session.store is None:
        return
    recorder = measuring.recorder
    recorder.follow_collectives(session.detector.recorder)
    world = session.world
    if world.local_world_size <= len(os.sched_getaffinity(0)):  # Ranks that share a core are slow in turn.
        recorder.report_steps_to(SlowRank(session.store.prefixed("rankwise/pace"), world.world_size).note)
    if recorder.folder is not None:
        try:
            note_clock(recorder.record, session.store.prefixed("rankwise/clock"), world.rank, hostnames)
        except TimeoutError:
            missing = "the clocks of the hosts were not compared: were all ranks given the folder of a report?"
            warn(missing, all_ranks=True)


def start_unjoined() -> None:
    """Measure the steps of a rank whose script may never join, as with torch's own DistributedDataParallel.

    Called by: a launcher that was given the folder of a report, before the script. ``join`` starts a new record.
    """
    reading = read_process()
    world = World(
        rank=reading.rank,
        world_size=reading.world_size,
        local_rank=reading.local_rank or 0,
        local_world_size=reading.local_world_size or 1,
        node_rank=reading.node_rank or 0,
        num_nodes=reading.num_nodes or 1,
        device="cpu",
        backend=UNJOINED,
        hostname=socket.gethostname(),
        source=reading.source,
    )
    start(world, None)
    atexit.register(meter.stop)


def _measuring_data(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function that yields the next batch of a torch loader, measured."""

    @wraps(inner)
    def call(iterator: object) -> object:
        is_training = torch.is_grad_enabled()
        part = meter.current.enter(DATA if is_training else EVALUATION)
        samples = 0
        try:
            batch = inner(iterator)
            if is_training and part != DATA:  # Otherwise it is rankwise.DataLoader that reads, and counts.
                samples = _rows_of(batch)
            return batch
        finally:
            meter.current.resume(part, samples=samples)

    return call


def _rows_of(batch: object) -> int:
    """Return how many samples a batch has: the rows of its first tensor, 0 if there is none."""
    while isinstance(batch, Mapping) or (isinstance(batch, Sequence) and not isinstance(batch, str)):
        values = list(batch.values()) if isinstance(batch, Mapping) else batch
        if not values:
            return 0
        batch = values[0]
    return len(batch) if isinstance(batch, torch.Tensor) and batch.dim() else 0


def _path(folder: str, rank: int) -> str | None:
    """Return the file of the record; without a report it lies beside the files for the launcher."""
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return str(record_path(Path(folder), *job_of_process(), rank))
    beside = stack_file()
    return f"{beside}.steps" if beside else None


def facts_of(world: World) -> dict[str, object]:
    """Return what describes a rank, for the head of its record."""
    job, attempt = job_of_process()
    return {
        "job": job,
        "launcher": launcher(),
        "rank": world.rank,
        "world_size": world.world_size,
        "local_rank": world.local_rank,
        "node_rank": world.node_rank,
        "num_nodes": world.num_nodes,
        "hostname": world.hostname,
        "device": world.device,
        "backend": world.backend,
        "source": world.source,
        "attempt": attempt,
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "script": sys.argv[0] if sys.argv else "",
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "rankwise": VERSION,
        "started": time.time(),
        "monotonic": time.monotonic(),
    }


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - half the time of Path.read_bytes
        return int(file.read().split()[1]) * _PAGE_BYTES
