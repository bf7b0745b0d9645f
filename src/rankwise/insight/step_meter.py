# SPDX-License-Identifier: Apache-2.0
"""Measures what this rank spends the time of each step on, and records it: the meter that listens to the core.

A step ends where the first part of the next one begins after an optimizer's update. Follows the thread that joined,
only.

Between two parts of a step nothing of this is in the processor's caches, and takes ten times as long as in a loop. So
there the meter only notes the time, and has the recorder add up several steps at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import time
from dataclasses import dataclass, field
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise import meter
from rankwise.health.flight_recorder import FlightRecorder
from rankwise.insight.network import TrafficNotes
from rankwise.insight.step_record import (
    ARRIVED,
    MAJOR_FAULTS,
    MEMORY_BYTES,
    NUM_VALUES,
    PROCESSOR,
    QUEUED,
    READ_FOR_EVALUATION,
    SAMPLES,
    SENT_BYTES,
    START,
    RecordFile,
    Step,
    add_segments,
)
from rankwise.meter import BACKWARD, DATA, EVALUATION, FORWARD, Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from pathlib import Path

    from rankwise.insight.device_times import DeviceTimes

_FIRST = frozenset((DATA, FORWARD, BACKWARD, EVALUATION))
"""The parts that a step may begin with."""
LEAST_PAUSE, MOST_PAUSE, PAUSE_SHARE = 0.1, 0.5, 0.02
"""Steps are recorded at this interval, in seconds: a share of the time so far. What came after the last time is lost
with a rank that is killed."""
USAGE_POLL_SECONDS = 0.1
"""How often the system is asked for memory, processor time and faults: they are those of the steps since."""
FIRST_DETAILED = 8
DETAIL_EVERY = 128
"""Of which steps each part and collective is recorded with its time: of the first ones, then of one in this many."""
SLOW = 2.0
"""And of a step that takes this many times as long as usual, but not of the next ``DETAIL_EVERY / 8``."""
MOST_SLICES = 512
"""How many parts of one step are recorded with their times: an evaluation may have any number."""
MOST_DETAIL_BYTES = 2**16
"""When details of a rank take this much, they become half as frequent."""
_NEWEST = 1 / 16
"""How much the newest step counts in how long a step usually takes."""


@dataclass(slots=True)
class _StepUnderWay:
    """The step under way."""

    number: int
    start: float
    ends: list[tuple[int, float]] = field(default_factory=list)
    """The parts that have ended, with when, and what was noted between them."""
    has_forward: bool = False
    has_updated: bool = False
    samples: int = 0
    sent_before: int = 0
    """How many bytes this rank had given to collectives as it began."""


class StepMeter(Meter):
    """The measurements of one rank, from join to leave.

    Its many fields are one clock: the step under way, those that have ended since, and when they are recorded.

    Args:
        recorder: closed with this.
        on_close: is called before.
    """

    def __init__(self, recorder: StepRecorder, on_close: Callable[[], None] = lambda: None) -> None:
        self.recorder, self.folder = recorder, recorder.folder
        self._on_close = on_close
        self.record, self._now = recorder.record, recorder.record.now
        self._device_times = recorder.device_times
        self._thread = get_ident()
        self._process = os.getpid()
        self._is_evaluated = False
        """Whether what was read last was used without gradients, and not for training so far."""
        self._began = monotonic()
        self._step = _StepUnderWay(1, self._began)
        """Replaced as a whole: the script may be interrupted anywhere, and train on."""
        self._ended: list[EndedStep] = []
        """The steps before this one that are not recorded."""
        self._record_at, self._wanted = self._began + LEAST_PAUSE, recorder.wanted(1)
        """When the steps that have ended are recorded, and after which one even before that."""

    @property
    def step(self) -> int:
        """The number of the step that is under way, from 1."""
        return self._step.number

    def enter(self, part: int) -> int:
        """Record that a part of the step begins; return the part before."""
        before = self.part
        if get_ident() == self._thread:
            now = monotonic()
            step = self._step
            step.ends.append((before, now))
            if self._device_times is not None or len(step.ends) > MOST_SLICES:
                self._note_end(step, before)
            if part in _FIRST:
                if self._step.has_updated:
                    self._end_step(now)
                step = self._step
                if part == EVALUATION:
                    self._is_evaluated = not step.has_forward
                elif part == DATA:
                    if self._is_evaluated:
                        step.samples = 0
                        step.ends.append((READ_FOR_EVALUATION, now))
                        if self._device_times is not None:
                            self._device_times.note(READ_FOR_EVALUATION)
                    self._is_evaluated = False
                else:
                    step.has_forward, self._is_evaluated = True, False
            self.part = self._now[0] = part
        return before

    def arrive(self, part: int) -> int:
        """Record that this rank depends on the others from here on, and that a part of the step begins."""
        before = self.part
        if get_ident() == self._thread:
            now, ends = monotonic(), self._step.ends
            ends += ((before, now), (ARRIVED, now))
            if self._device_times is not None:
                self._device_times.end_part(before)
                self._device_times.note(ARRIVED)
            self.part = self._now[0] = part
        return before

    def resume(self, part: int, *, samples: int = 0, has_updated: bool = False) -> None:
        """Record that a part is over, and the one before it continues; the next step may begin after an update."""
        if get_ident() == self._thread:
            step = self._step
            step.samples += samples
            step.has_updated = step.has_updated or has_updated
            step.ends.append((self.part, monotonic()))
            if self._device_times is not None or len(step.ends) > MOST_SLICES:
                self._note_end(step, self.part)
            self.part = self._now[0] = part

    def _note_end(self, step: _StepUnderWay, part: int) -> None:
        """Note on the device that a part has ended, and record the parts of this step if there are many."""
        if self._device_times is not None:
            self._device_times.end_part(part)
        if len(step.ends) > MOST_SLICES:
            self._record()
            self.recorder.add(step.number, step.start, step.ends)

    @contextlib.contextmanager
    def spending(self, part: int) -> Generator[None]:
        """Count the time inside the block as a part of the step."""
        before = self.enter(part)
        try:
            yield
        finally:
            meter.current.resume(before)  # Silent, if the block has left the world.

    def note(self, kind: str, **values: object) -> None:
        """Record something that happens rarely."""
        self.record.note({"kind": kind, **values})

    def note_event(self, text: str) -> None:
        """Record something that happened on this rank."""
        self.record.note({"kind": "event", "time": time.time(), "text": text})

    def show_values(self, values: Mapping[str, tuple[float | None, float]]) -> None:
        """Show the last values that were logged to those that read the record meanwhile."""
        self.record.show_values(values)

    def begin_timeline(self, record: RecordFile) -> None:
        """Also record every step in detail in ``record``, until :meth:`end_timeline`."""
        self._end_updated()
        self.recorder.begin_timeline(record)
        self._wanted = self.recorder.wanted(self._step.number)

    def end_timeline(self) -> None:
        """Record the step under way as far as it has come, and no more in detail."""
        self._end_updated()
        self.recorder.end_timeline(self._step.number, self._step.start, self._step.ends)

    def close(self) -> None:
        """Record the step under way, if it has updated parameters, and end the record.

        That step ends with its last part: what follows is the end of the script, and leaving the world.
        """
        if os.getpid() != self._process:
            return
        self._on_close()
        self._end_if_updated()
        self._record()
        self.recorder.close(self._step.number - 1)

    def _end_if_updated(self) -> None:
        step = self._step
        if step.has_updated:
            self._end_step(step.ends[-1][1] if step.ends else monotonic())

    def _end_updated(self) -> None:
        """End the step under way, if it has updated parameters, and record all that have ended."""
        self.resume(self.part)
        self._end_if_updated()
        self._record()

    def _end_step(self, now: float) -> None:
        step = self._step
        # If an interrupt comes between these two, the step ends once more, with what follows, and is recorded once.
        sent = self.recorder.flight.sent_bytes
        self._ended.append(EndedStep(step.number, step.start, step.ends, now, step.samples, sent - step.sent_before))
        self._step = _StepUnderWay(step.number + 1, now, sent_before=sent)
        if self._device_times is not None:
            self._device_times.end_step(step.number, now)
        self.record.show_step(step.number, now)
        number, seconds = self._wanted
        if now > self._record_at or step.number >= number or now - step.start > seconds:
            self._record()

    def _record(self) -> None:
        self.recorder.end_steps(self._ended)
        self._ended = [one for one in self._ended if one.number > self.record.num_steps]
        start = self._step.start
        pause = min(max(LEAST_PAUSE, PAUSE_SHARE * (start - self._began)), MOST_PAUSE)
        self._record_at, self._wanted = start + pause, self.recorder.wanted(self._step.number)


class EndedStep(NamedTuple):
    """A step as the meter has noted it."""

    number: int
    start: float
    ends: list[tuple[int, float]]
    """The parts that have ended, with when, and what was noted between them, without those added up before."""
    end: float
    samples: int
    sent_bytes: int


class Wanted(NamedTuple):
    """Which step the recorder wants as soon as it has ended: the first one that either holds for."""

    number: float
    seconds: float
    """One that takes longer than this."""


class _Sum(NamedTuple):
    """What parts of a step have added up to. Replaced as a whole, so that an interrupt loses nothing."""

    number: int
    """Of the step."""
    row: list[float]
    until: float
    """The end of the last part."""
    slices: list[tuple[int, float, float]]
    """The parts, with start and end."""

    @classmethod
    def of_nothing(cls, number: int, start: float) -> _Sum:
        row = [0.0] * NUM_VALUES
        row[START] = start
        return cls(number, row, start, [])


class StepRecorder:
    """The steps of one rank, from join to leave.

    Its many fields are what it adds to a row of the record: the times of the step, the system's counts, and details.

    Args:
        record: what takes the steps; closed with this.
        memory_bytes: returns how much memory this rank uses.
        folder: of the report, if the run was given one.
        device_times: of this rank's accelerator; its times take the place of the host's.
    """

    def __init__(
        self,
        record: RecordFile,
        memory_bytes: Callable[[], int],
        folder: Path | None = None,
        device_times: DeviceTimes | None = None,
    ) -> None:
        self.record = record
        self.folder = folder
        self.device_times = device_times
        self._memory_bytes = memory_bytes
        self._scheduling = _open_scheduling()
        self._usage = (0.0, 0.0, 0)
        self._read_usage()
        self._looked_at, self._memory = 0.0, 0
        self._traffic = TrafficNotes() if folder is not None else None
        self.flight = FlightRecorder()
        """The collectives of this rank, once it has joined."""
        self._on_step: Callable[[Step], None] | None = None
        self._every = DETAIL_EVERY
        self._detail_bytes = 0
        self._usual_seconds = 0.0
        self._rests_until = FIRST_DETAILED
        """The last step of which it does not matter whether it is slow."""
        self._timeline: RecordFile | None = None
        """Takes every step in detail, while someone wants a timeline."""
        self._sum = _Sum.of_nothing(0, 0.0)

    def follow_collectives(self, flight: FlightRecorder) -> None:
        """Record what ``flight`` has of collectives, to which others add: details with steps recorded in detail."""
        self.flight = flight

    def report_steps_to(self, listener: Callable[[Step], None]) -> None:
        """Call ``listener`` with each step, in the thread that trains. It must not raise."""
        self._on_step = listener

    def begin_timeline(self, record: RecordFile) -> None:
        """Also record every step in detail in ``record``, until :meth:`end_timeline`."""
        self._timeline = record

    def end_timeline(self, number: int, start: float, ends: list[tuple[int, float]]) -> None:
        """Record the step under way as far as it has come, and no more in detail."""
        if self._timeline is not None:
            self.add(number, start, ends)
            self._timeline.note(self._detail(number))
        self._timeline = None

    def wanted(self, number: int) -> Wanted:
        """Return which step to record as soon as it has ended, from this number on: with the times of its parts."""
        if self._timeline is not None or (self.folder is not None and number <= FIRST_DETAILED):
            return Wanted(number, math.inf)
        if self.folder is None:
            return Wanted(math.inf, math.inf)
        return Wanted(number + -number % self._every, SLOW * self._usual_seconds)

    def _is_detailed(self, number: int, seconds: float) -> bool:
        is_slow = number > self._rests_until and seconds > SLOW * self._usual_seconds
        if is_slow:
            self._rests_until = number + self._every // 8
        self._usual_seconds += (_NEWEST if number > 1 else 1.0) * (seconds - self._usual_seconds)
        if self._timeline is not None:
            return True
        return self.folder is not None and (is_slow or number <= FIRST_DETAILED or number % self._every == 0)

    def add(self, number: int, start: float, ends: list[tuple[int, float]]) -> None:
        """Add up parts of the step of this number, which began at ``start``, and clear ``ends``."""
        so_far = self._sum if self._sum.number == number else _Sum.of_nothing(number, start)
        row, since, slices = list(so_far.row), so_far.until, list(so_far.slices)
        segments: list[tuple[int, float]] = []
        for part, end in ends:
            if end < since:
                continue  # added before an interrupt
            segments.append((part, end - since))
            if len(slices) < MOST_SLICES and part >= 0:
                slices.append((part, since, end))
            since = end
        add_segments(row, segments)
        self._sum = _Sum(number, row, since, slices)
        ends.clear()

    def end_steps(self, steps: Sequence[EndedStep]) -> None:
        """Record steps that have ended, in order. Those that were recorded before an interrupt may be among them."""
        for step in steps:
            if step.number <= self.record.num_steps:
                continue
            self.add(step.number, step.start, step.ends)
            row = self._sum.row
            row[SAMPLES], row[SENT_BYTES] = step.samples, step.sent_bytes
            if step is steps[-1]:
                self._read_system(row, step)
            row[MEMORY_BYTES] = self._memory
            self.record.add(row)
            if self._is_detailed(step.number, step.end - step.start):
                self._note_detail(step.number)
            if self._on_step is not None and self.device_times is None:
                self._on_step(self.record.step(step.number))
        if self.device_times is not None:
            self._take_device_times(self.device_times)

    def close(self, num_steps: int) -> None:
        """Complete the record, of so many steps."""
        if self._traffic is not None:
            self._traffic.note(self.record, num_steps)
        if self._scheduling is not None:
            os.close(self._scheduling)
        self.record.close()

    def _take_device_times(self, device_times: DeviceTimes) -> None:
        """Replace the host's times of those steps that the device has finished."""
        for number, start, times in device_times.finished():
            if self.record.revise(number, start, times) and self._on_step is not None:
                self._on_step(self.record.step(number))

    def _read_system(self, row: list[float], last: EndedStep) -> None:
        """Ask the system what the steps since the last time have used, for the row of the last of them."""
        if last.end - self._looked_at > USAGE_POLL_SECONDS:
            self._looked_at = last.end
            row[PROCESSOR], row[QUEUED], row[MAJOR_FAULTS] = self._read_usage()
            self._memory = self._memory_bytes()
            if self._traffic is not None:
                self._traffic.note_if_due(self.record, last.number, last.end)

    def _read_usage(self) -> tuple[float, float, int]:
        """Return processor time, how long the main thread had none although it was ready, and faults, since last."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        queued = 0.0
        if self._scheduling is not None:
            queued = int(os.pread(self._scheduling, 64, 0).split()[1]) * 1e-9
        now = (usage.ru_utime + usage.ru_stime, queued, usage.ru_majflt)
        before, self._usage = self._usage, now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]

    def _note_detail(self, number: int) -> None:
        """Record the parts and collectives of the step in the row."""
        detail = self._detail(number)
        if self._timeline is not None:
            self._timeline.add(self._sum.row)
            self._timeline.note(detail)
        if self.folder is None:
            return
        self._detail_bytes += self.record.note(detail)
        if self._detail_bytes > MOST_DETAIL_BYTES:
            self._detail_bytes = 0
            self._every *= 2

    def _detail(self, number: int) -> dict[str, Any]:
        start = self._sum.row[START]
        return {
            "kind": "detail",
            "step": number,
            "start": start,
            "slices": [[part, _micro(begin - start), _micro(end - begin)] for part, begin, end in self._sum.slices],
            "collectives": [
                [
                    ticket.words,
                    _micro(ticket.since - start),
                    _micro(ticket.ended - ticket.since),
                    self.flight.name_of(ticket.exchange_id),
                    ticket.sequence,
                ]
                for ticket in self.flight.recent.copy()
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
