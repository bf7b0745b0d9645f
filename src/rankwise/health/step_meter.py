# SPDX-License-Identifier: Apache-2.0
"""Measures what this rank spends the time of each step on: which part of a step begins, and when a step ends.

Code that a training loop passes calls :func:`enter` and :func:`resume`; without a meter these return at once. A step
ends where the first part of the next one begins after an optimizer's update. Follows the thread that joined, only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections import deque
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any

from rankwise.health.step_record import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    EXCHANGE,
    FORWARD,
    OPTIMIZER,
    PARTS,
    SCRIPT,
    RecordFile,
    Step,
)
from rankwise.health.tcp_traffic import TrafficNotes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from rankwise.health.flight_recorder import Ticket

LOOK_SECONDS = 0.1
"""How often the system is asked for memory, processor time and faults: they are those of the steps since."""
FIRST_DETAILED = 8
DETAIL_EVERY = 128
"""Of which steps each part and collective is recorded with its time: of the first ones, then of one in this many."""
MOST_SLICES = 512
"""How many parts of one step are recorded with their times: an evaluation may have any number."""
MOST_DETAIL_BYTES = 2**16
"""When details of a rank take this much, they become half as frequent."""


class StepMeter:
    """The measurements of one rank, from join to leave.

    Args:
        record: what takes the steps; closed with the meter.
        memory_bytes: returns how much memory this rank uses.
        folder: of the report, if the run was given one.
    """

    def __init__(self, record: RecordFile, memory_bytes: Callable[[], int], folder: Path | None = None) -> None:
        self.record = record
        self.folder = folder
        self._memory_bytes = memory_bytes
        self._thread = get_ident()
        self._process = os.getpid()
        self._number = 1
        self._part = SCRIPT
        self._has_updated = False
        self._since = self._start = monotonic()
        self._spent = [0.0] * len(PARTS)
        self._arrival = self._late_exchange = 0.0
        self._around_exchange = SCRIPT
        """The part in which the exchange under way began."""
        self._samples = self._sent_bytes = 0
        self._scheduling = _open_scheduling()
        self._usage = (0.0, 0.0, 0)
        self._read_usage()
        self._looked_at, self._memory = 0.0, 0
        self._traffic = TrafficNotes() if folder is not None else None
        self._collectives: deque[Ticket] = deque()
        self._on_step: Callable[[Step], None] | None = None
        self._every = DETAIL_EVERY
        self._detail_bytes = 0
        self._timeline: RecordFile | None = None
        """Takes every step in detail, while someone wants a timeline."""
        self._slices: list[tuple[int, float, float]] | None = []
        """The parts of this step so far, with start and end, if it is recorded in detail."""

    def follow_collectives(self, recent: deque[Ticket]) -> None:
        """Record the collectives among ``recent``, to which others add, with steps that are recorded in detail."""
        self._collectives = recent

    def begin_timeline(self, record: RecordFile) -> None:
        """Also record every step in detail in ``record``, until :meth:`end_timeline`."""
        self._end_updated()
        self._timeline = record
        if self._slices is None:
            self._slices = []

    def end_timeline(self) -> None:
        """Record the step under way as far as it has come, and no more in detail."""
        self._end_updated()
        if self._timeline is not None and self._slices is not None:
            self._timeline.note(self._detail(self._slices))
        self._timeline = None

    def report_steps_to(self, listener: Callable[[Step], None]) -> None:
        """Call ``listener`` with each step, in the thread that trains. It must not raise."""
        self._on_step = listener

    @property
    def part(self) -> int:
        """The part of the step that is under way."""
        return self._part

    @property
    def step(self) -> int:
        """The number of the step that is under way, from 1."""
        return self._number

    def enter(self, part: int) -> int:
        """Note that a part of the step begins; return the part before, for :meth:`resume`."""
        before = self._part
        if get_ident() != self._thread:
            return before
        now = monotonic()
        self._spend(before, now)
        if self._has_updated and part in _FIRST:
            self._end_step(now)
        if part == EVALUATION and not self._spent[FORWARD]:
            # What was read so far was read for the evaluation.
            self._spent[EVALUATION] += self._spent[DATA]
            self._spent[DATA] = 0.0
            self._samples = 0
        elif part == EXCHANGE:
            self._around_exchange = before
            if not self._arrival:
                self._arrival = now
        self._part = part
        self.record.show(part)
        return before

    def resume(self, part: int) -> None:
        """Note that the part of the step that has begun last is over, and the one before it continues."""
        if get_ident() == self._thread:
            self._spend(self._part, monotonic())
            self._part = part
            self.record.show(part)

    def _spend(self, part: int, now: float) -> None:
        """Count the time since the last change as that of ``part``."""
        since, self._since = self._since, now
        self._spent[part] += now - since
        if part == EXCHANGE and self._around_exchange in _AFTER_EXCHANGE:
            self._late_exchange += now - since
        if self._slices is not None and len(self._slices) < MOST_SLICES:
            self._slices.append((part, since, now))

    def note_update(self) -> None:
        """Note that an optimizer has updated parameters."""
        self._has_updated = True

    def note_arrival(self) -> None:
        """Note that this rank has computed its gradients, and depends on the other ranks from here on."""
        self._arrival = monotonic()

    def count_samples(self, num: int) -> None:
        """Add samples that this rank takes."""
        self._samples += num

    def count_bytes(self, num: int) -> None:
        """Add bytes that this rank gives to a collective."""
        self._sent_bytes += num

    def close(self) -> None:
        """Record the step under way, if it has updated parameters, and end the record."""
        if os.getpid() != self._process:
            return
        self._end_updated()
        if self._traffic is not None:
            self._traffic.note(self.record, self._number - 1)
        if self._scheduling is not None:
            os.close(self._scheduling)
        self.record.close()

    def _end_updated(self) -> None:
        """End the step under way, if it has updated parameters."""
        now = monotonic()
        self._spend(self._part, now)
        if self._has_updated:
            self._end_step(now)

    def _end_step(self, now: float) -> None:
        if now - self._looked_at > LOOK_SECONDS:
            self._looked_at = now
            processor, queued, major_faults = self._read_usage()
            self._memory = self._memory_bytes()
            if self._traffic is not None:
                self._traffic.note_if_due(self.record, self._number, now)
        else:
            processor = queued = 0.0
            major_faults = 0
        step = Step(
            self._number,
            self._start,
            tuple(self._spent),
            max(0.0, self._arrival - self._start),
            self._late_exchange,
            processor,
            queued,
            self._samples,
            self._sent_bytes,
            self._memory,
            major_faults,
        )
        self.record.add(step)
        if self._on_step is not None:
            self._on_step(step)
        if self._slices is not None:
            self._note_detail(step, self._detail(self._slices))
        self._number += 1
        self._slices = [] if self._timeline is not None or self._is_sampled() else None
        self._start = now
        self._spent = [0.0] * len(PARTS)
        self._arrival = self._late_exchange = 0.0
        self._samples = self._sent_bytes = 0
        self._has_updated = False

    def _read_usage(self) -> tuple[float, float, int]:
        """Return processor time, how long the main thread had none although it was ready, and faults, since last."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        queued = 0.0
        if self._scheduling is not None:
            queued = int(os.pread(self._scheduling, 64, 0).split()[1]) * 1e-9
        now = (usage.ru_utime + usage.ru_stime, queued, usage.ru_majflt)
        before, self._usage = self._usage, now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]

    def _is_sampled(self) -> bool:
        """Return whether the report shows the step under way in detail."""
        return self.folder is not None and (self._number <= FIRST_DETAILED or self._number % self._every == 0)

    def _note_detail(self, step: Step, detail: dict[str, Any]) -> None:
        if self._timeline is not None:
            self._timeline.add(step)
            self._timeline.note(detail)
        if not self._is_sampled():
            return
        self._detail_bytes += self.record.note(detail)
        if self._detail_bytes > MOST_DETAIL_BYTES:
            self._detail_bytes = 0
            self._every *= 2

    def _detail(self, slices: list[tuple[int, float, float]]) -> dict[str, Any]:
        start = self._start
        return {
            "kind": "detail",
            "step": self._number,
            "start": start,
            "slices": [[part, _micro(begin - start), _micro(end - begin)] for part, begin, end in slices],
            "collectives": [
                [
                    ticket.words,
                    _micro(ticket.since - start),
                    _micro(ticket.ended - ticket.since),
                    ticket.exchange_id,
                    ticket.sequence,
                ]
                for ticket in self._collectives.copy()
                if ticket.ended is not None and ticket.since >= start
            ],
        }


def _open_scheduling() -> int | None:
    """Return a descriptor of the scheduler's statistics; ``None`` on a system without them. Source: proc(5)."""
    with contextlib.suppress(OSError):
        return os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    return None


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)


_AFTER_EXCHANGE = frozenset((OPTIMIZER, CHECKPOINT))
"""The parts that follow the exchange of gradients: waiting within them is for ranks that take longer for them."""
_FIRST = frozenset((DATA, FORWARD, BACKWARD, EVALUATION))
"""The parts that a step may begin with."""
_open: list[StepMeter] = []
"""The meter of this process, if it measures."""
# A forked process, such as a worker of a loader, is not the rank.
os.register_at_fork(after_in_child=_open.clear)


def start(meter: StepMeter) -> None:
    """Measure with ``meter`` from now on. Called by ``join``, and by a launcher's rank before its script."""
    _open.clear()
    _open.append(meter)


def pause() -> None:
    """Measure nothing until :func:`start`; the record stays open."""
    _open.clear()


def stop() -> None:
    """Stop measuring, and close the record."""
    while _open:
        _open.pop().close()


def current() -> StepMeter | None:
    """Return the meter of this process, if it measures."""
    return _open[0] if _open else None


def count_samples(num: int) -> None:
    """Count samples that this rank takes."""
    if _open:
        _open[0].count_samples(num)


def note_update() -> None:
    """Note that an optimizer has updated parameters."""
    if _open:
        _open[0].note_update()


def note_arrival() -> None:
    """Note that this rank has computed its gradients, and depends on the other ranks from here on."""
    if _open:
        _open[0].note_arrival()


def count_bytes(num: int) -> None:
    """Count bytes that this rank gives to a collective."""
    if _open:
        _open[0].count_bytes(num)


def enter(part: int) -> int:
    """Note that a part of the step begins; pass the result to :func:`resume` where it ends."""
    return _open[0].enter(part) if _open else SCRIPT


def resume(part: int) -> None:
    """Note that a part of the step is over."""
    if _open:
        _open[0].resume(part)


@contextlib.contextmanager
def spending(part: int) -> Generator[None]:
    """Count the time inside the block as a part of the step."""
    before = enter(part)
    try:
        yield
    finally:
        resume(before)


def note_layout(what: str, **values: object) -> None:
    """Record how ranks or a model are laid out, for pictures of the run: JSON values, by name."""
    if _open:
        _open[0].record.note({"kind": "layout", "what": what, **values})


def note_event(text: str) -> None:
    """Record something that happened on this rank, for the report of the run."""
    if _open:
        _open[0].record.note({"kind": "event", "time": time.time(), "text": text})
