# SPDX-License-Identifier: Apache-2.0
"""The states of the generators that a script draws from: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from rankwise.comm.collectives.objects import broadcast_object
from rankwise.parallel.randomness.model_draws import agree_on_generators, generators_of

if TYPE_CHECKING:
    from rankwise.comm.backends.protocol import Exchange


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorStates:
    """The states at one time."""

    torchs: list[torch.Tensor]
    pythons: tuple[Any, ...]
    numpys: Any

    @classmethod
    def now(cls, device: torch.device) -> Self:
        """Return the states of the CPU's generators and of a device's."""
        return cls([one.get_state() for one in generators_of(device)], random.getstate(), np.random.get_state())

    def restore(self, device: torch.device) -> None:
        """Go on from these states."""
        for one, state in zip(generators_of(device), self.torchs, strict=True):
            one.set_state(state)
        random.setstate(self.pythons)
        np.random.set_state(self.numpys)

    def are(self, other: GeneratorStates) -> bool:
        """Return whether both are the same."""
        return (
            all(torch.equal(one, two) for one, two in zip(self.torchs, other.torchs, strict=True))
            and self.pythons == other.pythons
            and all(np.array_equal(one, two) for one, two in zip(self.numpys, other.numpys, strict=True))
        )


def start_alike(exchange: Exchange, device: torch.device) -> None:
    """Give every rank's generators the states of rank zero's. Called by: every rank."""
    agree_on_generators(exchange, device)
    pythons, numpys = broadcast_object((random.getstate(), np.random.get_state()))
    random.setstate(pythons)
    np.random.set_state(numpys)
