# SPDX-License-Identifier: Apache-2.0
"""Streams and events of any accelerator, pinned memory, and values of a device that the host reads later.

A check whose condition holds raises in a later step, or when state is saved or the world is left.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from rankwise.torch_private.kernels import stream_of
from rankwise.world.device.kinds import is_accelerator, kind_named

if TYPE_CHECKING:
    from collections.abc import Callable


def pins(device: torch.device) -> bool:
    """Return whether batches for a device go through pinned memory unless the user says otherwise."""
    return is_accelerator(device.type) and kind_named(device.type).pins


def can_pin() -> bool:
    """Return whether there is an accelerator whose driver locks pages; torch cannot pin memory without one."""
    return torch.accelerator.is_available()


def new_stream(device: torch.device) -> torch.Stream | None:
    """Return a new stream on ``device``; ``None`` for the CPU, and for a device that has only one stream."""
    if not is_accelerator(device.type) or not kind_named(device.type).has_streams:
        return None
    try:
        return torch.Stream(device)
    except RuntimeError:  # a PrivateUse1 backend need not have streams
        return None


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream that this thread's calls on ``device`` go to."""
    return torch.accelerator.current_stream(device)


def stream_query(device: torch.device) -> Callable[[], torch.Stream] | None:
    """Return a faster :func:`current_stream` of one device, for what is asked for each gradient; ``None`` for the CPU.

    Args:
        device: with an index.
    """
    if not is_accelerator(device.type) or not kind_named(device.type).has_streams:
        return None
    return partial(stream_of, device.index)


def recorded(stream: torch.Stream) -> torch.Event:
    """Return an event recorded after everything submitted to ``stream`` so far."""
    event = torch.Event(stream.device)
    event.record(stream)
    return event


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread captures a graph of what it queues on ``device``."""
    return device.type != "cpu" and _capture_query(device.type)()


@cache
def _capture_query(kind: str) -> Callable[[], bool]:
    return getattr(torch.get_device_module(kind), "is_current_stream_capturing", lambda: False)


_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: calls of a thread are not checked against what other threads capture."""


def let_others_capture(device: torch.device) -> None:
    """Allow this thread to query events while another thread captures a graph, which that would invalidate.

    Called by: a thread that never captures.

    Source: CUDA's driver API, cuThreadExchangeStreamCaptureMode.
    """
    if device.type == "cuda" and torch.version.cuda is not None:
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


class TimingEvent:
    """A point in the queue of a device that measures time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.Event(device, enable_timing=True)

    def record(self) -> bool:
        """Queue it after everything on the device's current stream; return false if a graph is captured there."""
        if is_capturing(self._device):
            return False
        self._event.record(current_stream(self._device))
        return True

    def query(self) -> bool:
        """Return whether the device has reached it; false while a graph is captured, which asking would spoil."""
        return not is_capturing(self._device) and self._event.query()

    def synchronize(self) -> None:
        """Wait until the device has reached it."""
        self._event.synchronize()

    def elapsed_time(self, end: TimingEvent, /) -> float:
        """Return the milliseconds between this event and ``end``, both of which the device has reached."""
        return self._event.elapsed_time(end._event)


def timing_events(device: torch.device) -> Callable[[], TimingEvent] | None:
    """Return what returns a new event of ``device`` that measures time; ``None`` where there are none."""
    if not is_accelerator(device.type) or not kind_named(device.type).has_streams:
        return None
    try:
        begin, end = TimingEvent(device), TimingEvent(device)
        begin.record()
        end.record()
        end.synchronize()
        begin.elapsed_time(end)
    except RuntimeError:  # a PrivateUse1 backend need not have events, or not measure with them
        return None
    return partial(TimingEvent, device)


def wait_for_copies(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the copies from ``device`` that were started before this call."""
    if not kind_named(device.type).has_streams:
        return lambda: torch.accelerator.synchronize(device)
    return recorded(current_stream(device)).synchronize


# -- without making the device wait: copies, and checks of conditions -----------------------------------------


class Later:
    """The values of a small tensor, copied to the host behind what its device has to do."""

    def __init__(self, value: torch.Tensor) -> None:
        self._event: torch.Event | None = None
        self._value = value
        if value.device.type != "cpu" and kind_named(value.device.type).has_streams:
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            self._event = recorded(current_stream(value.device))

    def has_arrived(self) -> bool:
        """Return whether reading would not wait; false while a graph is captured, which asking would spoil."""
        return self._event is None or (not is_capturing(self._event.device) and self._event.query())

    def read(self) -> torch.Tensor:
        """Return the values, on the CPU; wait for them if they have not arrived."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._value


waiting: list[tuple[Later, Callable[[], None]]] = []
"""The checks that may still report."""


def check_later(condition: torch.Tensor, report: Callable[[], None]) -> None:
    """Call ``report`` in a later step if a condition, a tensor of no dims on a device, turns out to hold."""
    if not is_capturing(condition.device):
        waiting.append((Later(condition), report))


def run_checks(*, waits: bool = False) -> None:
    """Report the conditions that have turned out to hold; ``waits``: also those of work that is not done."""
    while waiting and (waits or waiting[0][0].has_arrived()):
        condition, report = waiting.pop(0)
        if bool(condition.read()):
            report()


def forget_checks() -> None:
    """Forget all of them. Called when the world is left."""
    waiting.clear()
