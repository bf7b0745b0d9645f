# SPDX-License-Identifier: Apache-2.0
"""Measures what this rank spends the time of each step on: which part of a step begins, and when a step ends.

Code that a training loop passes calls ``meter``, which does nothing on a rank that does not measure. A step
ends where the first part of the next one begins after an optimizer's update. Follows the thread that joined, only.

Between two parts of a step nothing of this is in the processor's caches, and takes ten times as long as in a loop. So
there the meter only notes the time, and has several steps added up at once.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING

from rankwise.health.step_record import (
    ARRIVED,
    BACKWARD,
    DATA,
    EVALUATION,
    FAILURE,
    FORWARD,
    READ_FOR_EVALUATION,
    SCRIPT,
)
from rankwise.health.step_recorder import MOST_SLICES, EndedStep

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from rankwise.health.step_record import RecordFile
    from rankwise.health.step_recorder import StepRecorder


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
    sent_bytes: int = 0


class Meter:
    """Measures nothing: what a rank has that does not measure its steps."""

    part = SCRIPT
    """The part of the step that is under way."""

    def enter(self, part: int) -> int:
        """Note that a part of the step begins; return the part before, for :meth:`resume`."""
        return part

    def resume(self, part: int) -> None:
        """Note that the part of the step that has begun last is over, and the one before it continues."""

    def note_update(self) -> None:
        """Note that an optimizer has updated parameters."""

    def note_arrival(self) -> None:
        """Note that this rank has computed its gradients, and depends on the other ranks from here on."""

    def count_samples(self, num: int) -> None:
        """Add samples that this rank takes."""

    def count_bytes(self, num: int) -> None:
        """Add bytes that this rank gives to a collective."""


class StepMeter(Meter):
    """The measurements of one rank, from join to leave. The recorder is closed with it."""

    def __init__(self, recorder: StepRecorder) -> None:
        self.recorder = recorder
        self.record, self._now = recorder.record, recorder.record.now
        self._device_times = recorder.device_times
        self._thread = get_ident()
        self._process = os.getpid()
        self.part = SCRIPT
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
                        self._note(READ_FOR_EVALUATION, now)
                    self._is_evaluated = False
                else:
                    step.has_forward, self._is_evaluated = True, False
            self.part = self._now[0] = part
        return before

    def resume(self, part: int) -> None:
        """Note that a part is over, and the one before it continues."""
        if get_ident() == self._thread:
            step = self._step
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

    def _note(self, what: int, now: float) -> None:
        """Note something between two parts."""
        self._step.ends.append((what, now))
        if self._device_times is not None:
            self._device_times.note(what)

    def note_update(self) -> None:
        """Note an update; the next part that a step may begin with begins the next one."""
        if get_ident() == self._thread:
            self._step.has_updated = True

    def note_arrival(self) -> None:
        """Note that this rank depends on the others from here on."""
        if get_ident() == self._thread:
            now, ends = monotonic(), self._step.ends
            ends += ((self.part, now), (ARRIVED, now))
            if self._device_times is not None:
                self._device_times.end_part(self.part)
                self._device_times.note(ARRIVED)

    def count_samples(self, num: int) -> None:
        """Add samples that this rank takes."""
        if get_ident() == self._thread:
            self._step.samples += num

    def count_bytes(self, num: int) -> None:
        """Add bytes that this rank gives to a collective, on any thread."""
        self._step.sent_bytes += num

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
        self._ended.append(EndedStep(step.number, step.start, step.ends, now, step.samples, step.sent_bytes))
        self._step = _Step(step.number + 1, now)
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


_FIRST = frozenset((DATA, FORWARD, BACKWARD, EVALUATION))
"""The parts that a step may begin with."""
_SILENT = Meter()
meter: Meter = _SILENT
"""The meter of this process."""
_of_parent: list[Meter] = []
"""The meter of the process that forked this one. Kept: where an event of a GPU is destroyed in a forked process, torch
ends the process."""


def start(new: Meter) -> None:
    """Measure with ``new`` from now on. Called by ``join``, and by a launcher's rank before its script."""
    global meter  # noqa: PLW0603 - a call through a function costs as much as what the meter does
    meter = new


def pause() -> None:
    """Measure nothing until :func:`start`; the record stays open."""
    start(_SILENT)


def _leave_to_parent() -> None:
    """Measure nothing in a forked process, such as a worker of a loader: it is not the rank."""
    _of_parent.append(meter)
    pause()


os.register_at_fork(after_in_child=_leave_to_parent)


def stop() -> None:
    """Stop measuring, and close the record."""
    measuring = current()
    pause()
    if measuring is not None:
        measuring.close()


def current() -> StepMeter | None:
    """Return the meter of this process, if it measures."""
    return meter if isinstance(meter, StepMeter) else None


@contextlib.contextmanager
def spending(part: int) -> Generator[None]:
    """Count the time inside the block as a part of the step."""
    before = meter.enter(part)
    try:
        yield
    finally:
        meter.resume(before)


def note_layout(what: str, **values: object) -> None:
    """Record how ranks or a model are laid out, for pictures of the run: JSON values, by name."""
    if isinstance(meter, StepMeter):
        meter.record.note({"kind": "layout", "what": what, **values})


def note_failure(text: str, ranks: Sequence[int], *, is_of_another: bool) -> None:
    """Record why this rank ends.

    Args:
        text: the error, with its traceback if it is this rank's own.
        ranks: whose failure it is, as far as known.
        is_of_another: whether it is only the consequence of another rank's failure.
    """
    if isinstance(meter, StepMeter):
        whose = {"ranks": list(ranks), "is_of_another": is_of_another}
        meter.record.note({"kind": FAILURE, "time": time.time(), "text": text, **whose})


def note_event(text: str) -> None:
    """Record something that happened on this rank, for the report of the run."""
    if isinstance(meter, StepMeter):
        meter.record.note({"kind": "event", "time": time.time(), "text": text})
