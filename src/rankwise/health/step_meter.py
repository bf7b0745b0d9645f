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
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING

from rankwise.health.segments import ARRIVED, READ_FOR_EVALUATION
from rankwise.health.step_record import BACKWARD, DATA, EVALUATION, FAILURE, FORWARD, SCRIPT
from rankwise.health.step_recorder import MOST_SLICES, EndedStep

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from rankwise.health.step_record import RecordFile
    from rankwise.health.step_recorder import StepRecorder


LEAST_PAUSE, MOST_PAUSE, PAUSE_SHARE = 0.1, 0.5, 0.02
"""Steps are recorded at this interval, in seconds: a share of the time so far. What came after the last time is lost
with a rank that is killed."""


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
        self.step = 1
        """The number of the step that is under way."""
        self.part = SCRIPT
        self._has_forward = self._has_updated = False
        self._is_evaluated = False
        """Whether what was read last was used without gradients, and not for training so far."""
        self._samples = self._sent_bytes = 0
        self._ends: list[tuple[int, float]] = []
        """The parts of this step that have ended, with when, and what was noted between them."""
        self._ended: list[EndedStep] = []
        """The steps before this one that are not recorded."""
        self._start = self._began = monotonic()
        self._record_at, self._wanted = self._began + LEAST_PAUSE, recorder.wanted(1)
        """When the steps that have ended are recorded, and after which one even before that."""

    def enter(self, part: int) -> int:
        """Note that a part of the step begins; return the part before."""
        before = self.part
        if get_ident() == self._thread:
            now = monotonic()
            self._ends.append((before, now))
            if self._device_times is not None or len(self._ends) > MOST_SLICES:
                self._note_end(before)
            if part in _FIRST:
                self._begin_first(part, now)
            self.part = self._now[0] = part
        return before

    def resume(self, part: int) -> None:
        """Note that a part is over, and the one before it continues."""
        if get_ident() == self._thread:
            self._ends.append((self.part, monotonic()))
            if self._device_times is not None or len(self._ends) > MOST_SLICES:
                self._note_end(self.part)
            self.part = self._now[0] = part

    def _note_end(self, part: int) -> None:
        """Note on the device that a part has ended, and record the parts of this step if there are many."""
        if self._device_times is not None:
            self._device_times.end_part(part)
        if len(self._ends) > MOST_SLICES:
            self._record()
            self.recorder.add(self._ends)

    def _begin_first(self, part: int, now: float) -> None:
        """Begin a part that a step may begin with."""
        if self._has_updated:
            self._end_step(now)
        if part == EVALUATION:
            self._is_evaluated = not self._has_forward
        elif part == DATA:
            if self._is_evaluated:
                self._samples = 0
                self._note(READ_FOR_EVALUATION, now)
            self._is_evaluated = False
        else:
            self._has_forward, self._is_evaluated = True, False

    def _note(self, what: int, now: float) -> None:
        """Note something between two parts."""
        self._ends.append((what, now))
        if self._device_times is not None:
            self._device_times.note(what)

    def note_update(self) -> None:
        """Note an update; the next part that a step may begin with begins the next one."""
        if get_ident() == self._thread:
            self._has_updated = True

    def note_arrival(self) -> None:
        """Note that this rank depends on the others from here on."""
        if get_ident() == self._thread:
            self.resume(self.part)
            self._note(ARRIVED, self._ends[-1][1] if self._ends else monotonic())

    def count_samples(self, num: int) -> None:
        """Add samples that this rank takes."""
        if get_ident() == self._thread:
            self._samples += num

    def count_bytes(self, num: int) -> None:
        """Add bytes that this rank gives to a collective, on any thread."""
        self._sent_bytes += num

    def begin_timeline(self, record: RecordFile) -> None:
        """Also record every step in detail in ``record``, until :meth:`end_timeline`."""
        self._end_updated()
        self.recorder.begin_timeline(record)
        self._wanted = self.recorder.wanted(self.step)

    def end_timeline(self) -> None:
        """Record the step under way as far as it has come, and no more in detail."""
        self._end_updated()
        self.recorder.end_timeline(self.step, self._ends)

    def close(self) -> None:
        """Record the step under way, if it has updated parameters, and end the record.

        That step ends with its last part: what follows is the end of the script, and leaving the world.
        """
        if os.getpid() != self._process:
            return
        if self._has_updated:
            self._end_step(self._ends[-1][1] if self._ends else monotonic())
        self._record()
        self.recorder.close(self.step - 1)

    def _end_updated(self) -> None:
        """End the step under way, if it has updated parameters, and record all that have ended."""
        self.resume(self.part)
        if self._has_updated:
            self._end_step(self._ends[-1][1] if self._ends else monotonic())
        self._record()

    def _end_step(self, now: float) -> None:
        if self._device_times is not None:
            self._device_times.end_step(self.step, now)
        self._ended.append((self._ends, now, self._samples, self._sent_bytes))
        number, seconds = self._wanted
        is_due = now > self._record_at or self.step >= number or now - self._start > seconds
        self.record.show_step(self.step, now)
        self.step += 1
        self._ends = []
        self._samples = self._sent_bytes = 0
        self._start = now
        self._has_forward = self._has_updated = False
        if is_due:
            self._record()

    def _record(self) -> None:
        self.recorder.end_steps(self._ended, self.step - 1)
        self._ended.clear()
        pause = min(max(LEAST_PAUSE, PAUSE_SHARE * (self._start - self._began)), MOST_PAUSE)
        self._record_at, self._wanted = self._start + pause, self.recorder.wanted(self.step)


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
