# SPDX-License-Identifier: Apache-2.0
"""Opens and closes the measurements of this rank: its record with facts about it and its clock, and timelines.

Called by ``join`` and ``leave``. In order: the record; how far the clocks of other hosts are ahead of rank zero's, as
measured over the job's store; a timeline of all ranks in one file: every step in detail, from one call to another.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from rankwise import meter
from rankwise.comm import step_hooks
from rankwise.errors import ConfigurationError
from rankwise.insight.device_times import DeviceTimes
from rankwise.insight.slow_rank import SlowRank
from rankwise.insight.step_meter import StepMeter, StepRecorder
from rankwise.insight.step_record import RecordFile, parse
from rankwise.insight.trace_events import as_trace, events_of_ranks, origin_of
from rankwise.log import log, warn
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
    from rankwise.insight.step_record import Record
    from rankwise.store.client import Store


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


def follow(session: Session, hostnames: Callable[[], Sequence[str]]) -> None:
    """Record the collectives of a rank that has joined, and how far its clock is ahead of rank zero's.

    Called by: join, on every rank, after :func:`start`. The first rank of each host but rank zero's exchanges a few
    messages with rank zero if the run was given the folder of a report; ``hostnames`` returns those of all ranks.
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
            note_clock(recorder.record, session.store.prefixed("rankwise/clock"), world.rank, hostnames())
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
    """Return the file of the record; without a report it lies next to the files for the launcher."""
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return str(record_path(Path(folder), *job_of_process(), rank))
    stacks = stack_file()
    return f"{stacks}.steps" if stacks else None


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


NUM_PINGS = 8
CLOCK_SECONDS = 10.0
"""How long an answer about a clock may take."""


def measure_clock(
    store: Store, rank: int, asking: Sequence[int], clock: Callable[[], float], timeout_seconds: float
) -> tuple[float, float] | None:
    """Return the largest error, and how far this rank's clock is ahead of rank zero's, in seconds.

    Called by: rank zero, and every rank of ``asking``, which take turns. Others return ``None`` at once, as rank zero
    does when it has answered all.

    Args:
        store: keys of this measurement.
        rank: this rank.
        asking: the ranks that compare their clock, such as the first of each other host.
        clock: returns seconds.
        timeout_seconds: how long one answer may take.

    Raises:
        TimeoutError: an answer took longer.
    """
    if rank == 0:
        for other in asking:
            for number in range(NUM_PINGS):
                store.get(f"{other}/{number}/asked", timeout_seconds)
                store.set(f"{other}/{number}/told", repr(clock()))
        return None
    if rank not in asking:
        return None
    # Those before this rank go first.
    patience = timeout_seconds * len(asking)
    return min(_ask(store, f"{rank}/{number}", clock, patience) for number in range(NUM_PINGS))


def _ask(store: Store, key: str, clock: Callable[[], float], timeout_seconds: float) -> tuple[float, float]:
    asked = clock()
    store.set(f"{key}/asked", "")
    told = float(store.get(f"{key}/told", timeout_seconds))
    return ahead_of(asked, told, clock())


def ahead_of(asked: float, told: float, heard: float) -> tuple[float, float]:
    """Return the largest error, and how far the asking clock is ahead of the answering one."""
    return (heard - asked) / 2, (asked + heard) / 2 - told


def note_clock(record: RecordFile, store: Store, rank: int, hostnames: Sequence[str]) -> None:
    """Record how far this host's clock is ahead of rank zero's. Called by: every rank.

    Args:
        record: of this rank.
        store: keys of this measurement, unused so far.
        rank: this rank.
        hostnames: of all ranks.

    Raises:
        TimeoutError: a rank did not answer.
    """
    own = hostnames.index(hostnames[rank])
    others = [first for name in dict.fromkeys(hostnames) if (first := hostnames.index(name))]
    measured = _clock_of_host(store, rank, own, others) if others else None
    if measured is not None:
        error, ahead = measured
        record.note({"kind": "clock", "ahead": ahead, "error": error})


def _clock_of_host(store: Store, rank: int, first: int, others: Sequence[int]) -> tuple[float, float] | None:
    """Return the error, and how far this host's clock is ahead of rank zero's; ``None`` on rank zero's host."""
    measured = measure_clock(store, rank, others, time.monotonic, CLOCK_SECONDS)
    if measured is not None:
        store.set(f"host/{rank}", json.dumps(measured))
    elif first:
        error, ahead = json.loads(store.get(f"host/{first}", CLOCK_SECONDS * len(others)))
        measured = error, ahead
    return measured


WAIT_SECONDS = 10.0
"""How long rank zero waits for the parts of the others, all together."""


class Timeline:
    """The timeline that is being recorded. Created by: every rank.

    Args:
        session: of this rank.
        path: the file that rank zero writes at the end.
        number: of this timeline, the same on every rank.
        hostnames: of all ranks.

    Raises:
        ConfigurationError: rank zero cannot write the file, or steps are not measured (``--report off``).
    """

    def __init__(self, session: Session, path: Path, number: int, hostnames: Sequence[str]) -> None:
        measuring = meter.current
        if not isinstance(measuring, StepMeter):
            raise ConfigurationError(
                "A timeline needs the times of steps, which are not measured.",
                evidence="--report off, or RANKWISE_REPORT=off",
                do="run without that",
            )
        self._meter = measuring
        self._world = session.world
        self._path = path
        self._store = None if session.store is None else session.store.prefixed(f"rankwise/timeline/{number}")
        if self._world.rank == 0:
            _try_to_write(path)
        with TemporaryDirectory(prefix="rankwise-timeline-") as folder:
            path_of_own = Path(folder) / "steps"
            self._record = RecordFile(str(path_of_own), facts_of(self._world))
            self._own = path_of_own.open("rb")
        if self._store is not None:
            try:
                note_clock(self._record, self._store.prefixed("clock"), self._world.rank, hostnames)
            except TimeoutError:
                warn("the clocks of the hosts were not compared: have all ranks started the timeline?", all_ranks=True)
        self._meter.begin_timeline(self._record)

    def stop(self) -> None:
        """End the timeline: rank zero writes the file, the other ranks send it their part. Called by: every rank."""
        self._meter.end_timeline()
        self._record.close()
        with self._own:
            own = self._own.read()
        if self._world.rank != 0:
            if self._store is not None:
                self._store.set(str(self._world.rank), own)
            return
        records = [parse(own, "rank 0"), *self._of_others()]
        missing = self._world.world_size - len(records)
        try:
            self._path.write_text(as_trace(events_of_ranks(records, origin_of(records))), encoding="utf-8")
        except OSError as error:
            warn(f"the timeline {self._path} cannot be written: {error.strerror}")
            return
        log(f"timeline of {len(records)} ranks: {self._path}")
        if missing:
            warn(f"{missing} of {self._world.world_size} ranks are missing in the timeline: have they started it too?")

    def _of_others(self) -> list[Record]:
        if self._store is None:
            return []
        found: list[Record] = []
        deadline = time.monotonic() + WAIT_SECONDS
        for rank in range(1, self._world.world_size):
            try:
                data = self._store.get(str(rank), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                continue
            found.append(parse(data, f"rank {rank}"))
        return found


def _try_to_write(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ConfigurationError(
            f"The timeline {path} cannot be written: {error.strerror}.", do="choose another file"
        ) from error
