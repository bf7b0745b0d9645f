# SPDX-License-Identifier: Apache-2.0
"""Whole gradients of a sharded model's microsteps, added up on this rank with their weights. Used by shard.

Each version of torch keeps the gradients of microsteps in its own way, or reduces them as they are. Knows no other
rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.parallel.core.weight_unit import power_near

if TYPE_CHECKING:
    from collections.abc import MutableMapping


class ShardedAccumulation:
    """The microsteps since the last exact gradient."""

    def __init__(self) -> None:
        self.is_continued = False
        """Whether another microstep follows the one under way."""
        self.counted_in: str | None = None
        """What the weights of its microsteps count, in words, once one has come that counts anything."""
        self.carried = 0.0
        """The sum of the weights of the microsteps."""
        self.unit = 1.0
        """What this rank counts weights in, so that gradients stay about as large as they are."""
        self.num_carried = 0
        self._earlier: MutableMapping[int, torch.Tensor] = {}
        """By number of the parameter, the weighted sum of the gradients of microsteps: [as the whole one]."""

    def set_continued(self, value: bool) -> bool:  # noqa: FBT001 - what it sets
        """Say whether another microstep follows the one under way; return what was said before."""
        before, self.is_continued = self.is_continued, value
        return before

    @property
    def is_open(self) -> bool:
        """Whether gradients of some microsteps wait, on every rank, for those of the last."""
        return self.num_carried > 0

    def put_earlier_gradients_aside(self) -> None:
        """Do nothing: torch reduces a step's gradients before it adds them to what is in ``grad``."""

    def give_back_earlier(self) -> None:
        """Do nothing, as :meth:`put_earlier_gradients_aside`."""

    def factor(self, weight: float) -> float:
        """Return what to multiply the gradients of a microstep with, which weigh so much."""
        if not self.is_open:
            self.unit = power_near(weight) if weight > 0 else 1.0
        return weight / self.unit

    def keep(self, number: int, gradient: torch.Tensor, dtype: torch.dtype | None) -> None:
        """Add a microstep's gradient to those that wait for the last one.

        Args:
            number: of the parameter.
            gradient: multiplied already.
            dtype: to keep it in, which it is reduced in; ``None`` for its own.
        """
        with torch.no_grad():
            if number in self._earlier:
                self._earlier[number] += gradient
            else:
                self._earlier[number] = gradient.to(dtype or gradient.dtype)

    def take(self, number: int) -> torch.Tensor | None:
        """Return what waits for a parameter's last gradient, and forget it."""
        return self._earlier.pop(number, None)

    def add(self, weight: float) -> None:
        """Note that a microstep has been added up."""
        self.carried += weight
        self.num_carried += 1

    def close(self) -> None:
        """Forget everything."""
        self._earlier.clear()
        self.counted_in = None
        self.carried = 0.0
        self.unit = 1.0
        self.num_carried = 0
