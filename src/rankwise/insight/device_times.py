# SPDX-License-Identifier: Apache-2.0
"""What the parts of a step take on an accelerator: by events between them, which nothing waits for.

The host queues work and does not wait for it, so that its own clock says how long queueing took. Events between the
parts tell the device's times, once the device has reached them. When a step began follows from these times; it is kept
between when the host queued the first event of the step and when it saw the last one reached, so that errors of the
device's clock do not add up.
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from rankwise.insight.step_record import LATE_EXCHANGE, add_segments
from rankwise.meter import SCRIPT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_WAITING = 256
"""From how many events on, which the device had not reached when last seen, each new one is a reason to look again."""


class TimingEvent(Protocol):
    """A point in the device's queue, as torch.Event with ``enable_timing``."""

    def record(self) -> bool:
        """Queue it after everything that this thread has queued; return whether that is possible here."""
        ...

    def query(self) -> bool:
        """Return whether the device has reached it."""
        ...

    def elapsed_time(self, end: Self, /) -> float:
        """Return the milliseconds between this event and ``end``, both of which the device has reached."""
        ...


class TimedStep(NamedTuple):
    """What a step took on the device."""

    number: int
    start: float
    """By the host's monotonic clock, in seconds."""
    times: list[float]
    """The first numbers of a step's row, in seconds: each part, ``ARRIVAL``, ``LATE_EXCHANGE``."""


class _StepEnd(NamedTuple):
    number: int
    host_time: float


class DeviceTimes:
    """The events of one rank's steps. Owned by the meter, which calls it where it looks at the host's clock.

    Args:
        new_event: returns an event of this rank's device.
    """

    def __init__(self, new_event: Callable[[], TimingEvent]) -> None:
        self._new_event = new_event
        self._is_lost = False
        """Whether the device has failed: then whatever uses it next reports that."""
        self._free: list[TimingEvent] = []
        self._waiting: deque[tuple[int, TimingEvent | None] | _StepEnd] = deque()
        """What the device had not reached when last seen: ends of parts, notes between them, ends of steps."""
        self._reached: TimingEvent | None = None
        """The last event that the device has reached."""
        self._segments: list[tuple[int, float]] = []
        """Of the step in which that is."""
        self._start = self._host_start = monotonic()
        """When that step began: by the device's times, and when the host queued its first event."""
        self._finished: deque[TimedStep] = deque()
        self.end_part(SCRIPT)  # where the first part begins

    def end_part(self, part: int) -> None:
        """Record that a part of the step ends here."""
        event = self._recorded()
        if event is None:
            return  # Its time will be that of the part which ends next.
        self._waiting.append((part, event))
        if len(self._waiting) > MOST_WAITING:
            self._read_reached()

    def note(self, what: int) -> None:
        """Note what :func:`add_segments` takes without a duration."""
        self._waiting.append((what, None))

    def end_step(self, number: int, host_time: float) -> None:
        """Record that the part that has just ended was the last one of a step."""
        self._waiting.append(_StepEnd(number, host_time))

    def finished(self) -> Iterator[TimedStep]:
        """Yield the steps that the device has finished since the last call, in order."""
        self._read_reached()
        while self._finished:
            yield self._finished.popleft()

    def _read_reached(self) -> None:
        """Note the times of what the device has reached."""
        try:
            self._read_queue()
        except RuntimeError:
            self._is_lost = True

    def _read_queue(self) -> None:
        while self._waiting and not self._is_lost:
            match self._waiting[0]:
                case _StepEnd(number, host_time):
                    self._finish(number, host_time)
                case part, None:
                    self._segments.append((part, 0.0))
                case part, event:
                    if not event.query():
                        return
                    if self._reached is not None:
                        # Streams that do not wait for each other may reach them in another order.
                        seconds = max(0.0, self._reached.elapsed_time(event) / 1e3)
                        self._segments.append((part, seconds))
                        self._free.append(self._reached)
                    self._reached = event
            self._waiting.popleft()

    def _finish(self, number: int, host_time: float) -> None:
        seconds = sum(seconds for _, seconds in self._segments)
        # The device cannot have begun before the host, nor end after this moment.
        start = max(self._host_start, min(self._start, monotonic() - seconds))
        times = [0.0] * (LATE_EXCHANGE + 1)
        add_segments(times, self._segments)
        self._finished.append(TimedStep(number, start, times))
        self._start, self._host_start = start + seconds, host_time
        self._segments = []

    def _recorded(self) -> TimingEvent | None:
        if self._is_lost:
            return None
        event = self._free.pop() if self._free else self._new_event()
        try:
            is_queued = event.record()
        except RuntimeError:
            self._is_lost = True
            return None
        if not is_queued:
            self._free.append(event)
        return event if is_queued else None
