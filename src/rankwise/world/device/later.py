# SPDX-License-Identifier: Apache-2.0
"""Values of a device that the host reads later, without making the device wait: copies, and checks of conditions.

A check whose condition holds raises in a later step, or when state is saved or the world is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.world.device.kinds import kind_named
from rankwise.world.device.streams import current_stream, is_capturing, recorded

if TYPE_CHECKING:
    from collections.abc import Callable


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
