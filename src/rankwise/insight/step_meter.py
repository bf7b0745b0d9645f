# SPDX-License-Identifier: Apache-2.0
"""Measures what this rank spends the time of each step on: the meter that listens to the core.

A step ends where the first part of the next one begins after an optimizer's update. Follows the thread that joined,
only.

Between two parts of a step nothing of this is in the processor's caches, and takes ten times as long as in a loop. So
there the meter only notes the time, and has several steps added up at once.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING

from rankwise import meter
from rankwise.insight.step_record import ARRIVED, READ_FOR_EVALUATION
from rankwise.insight.step_recorder import MOST_SLICES, EndedStep
from rankwise.meter import BACKWARD, DATA, EVALUATION, FORWARD, Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from rankwise.insight.step_record import RecordFile
    from rankwise.insight.step_recorder import StepRecorder

_FIRST = frozenset((DATA, FORWARD, BACKWARD, EVALUATION))
"""The parts that a step may begin with."""
LEAST_PAUSE, MOST_PAUSE, PAUSE_SHARE = 0.1, 0.5, 0.02
"""Steps are recorded at this interval, in seconds: a share of the time so far. What came after the last time is lost
with a rank that is killed."""


@dataclass(slots=True)
class _Step:
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
        self._step = _Step(1, self._began)
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
        """Note that a part of the step begins; return the part before."""
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
        """Note that this rank depends on the others from here on, and that a part of the step begins."""
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
        """Note that a part is over, and the one before it continues; the next step may begin after an update."""
        if get_ident() == self._thread:
            step = self._step
            step.samples += samples
            step.has_updated = step.has_updated or has_updated
            step.ends.append((self.part, monotonic()))
            if self._device_times is not None or len(step.ends) > MOST_SLICES:
                self._note_end(step, self.part)
            self.part = self._now[0] = part

    def _note_end(self, step: _Step, part: int) -> None:
        """Note on the device that a part has ended, and record the parts of this step if there are many."""
        if self._device_times is not None:
            self._device_times.end_part(part)
        if len(step.ends) > MOST_SLICES:
            self._record()
            self.recorder.add(step.number, step.start, step.ends)

    @contextmanager
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
        """Show the last values that were logged to those who look meanwhile."""
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
        self._step = _Step(step.number + 1, now, sent_before=sent)
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
