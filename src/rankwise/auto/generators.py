# SPDX-License-Identifier: Apache-2.0
"""The states of the generators that a script draws from: torch's, Python's and NumPy's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from rankwise.data.seeds import generator_state, set_generator_state
from rankwise.replicate.random_numbers.source import default_generator

if TYPE_CHECKING:
    from rankwise.data.seeds import GeneratorState


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorStates:
    """The states at one time. ``==`` would compare tensors."""

    of_cpu: GeneratorState
    of_device: torch.Tensor | None
    """Of torch's generator of an accelerator."""

    @classmethod
    def now(cls, device: torch.device) -> Self:
        """Return the states of the CPU's generators, and of a device's."""
        generator = None if device.type == "cpu" else default_generator(device)
        return cls(generator_state(), None if generator is None else generator.get_state())

    def restore(self, device: torch.device) -> None:
        """Go on from these states."""
        set_generator_state(self.of_cpu)
        generator = default_generator(device)
        if generator is not None and self.of_device is not None:
            generator.set_state(self.of_device)

    def are(self, other: GeneratorStates) -> bool:
        """Return whether both are the same."""
        pythons, numpys, torchs = self.of_cpu
        other_pythons, other_numpys, other_torchs = other.of_cpu
        of_device = torchs[:0] if self.of_device is None else self.of_device
        other_of_device = torchs[:0] if other.of_device is None else other.of_device
        return (
            pythons == other_pythons
            and all(np.array_equal(one, two) for one, two in zip(numpys, other_numpys, strict=True))
            and torch.equal(torchs, other_torchs)
            and torch.equal(of_device, other_of_device)
        )
