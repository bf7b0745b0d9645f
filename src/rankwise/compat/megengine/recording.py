# SPDX-License-Identifier: Apache-2.0
"""The tensors that backward of a recording GradManager must reach, besides the losses that are passed to it.

No loss of a rank depends on the tensors it sends, and those it receives depend on no tensor of the rank: backward would
miss both. ``distributed.functional`` adds them here, and the GradManager uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class Recording:
    """One recording of one GradManager."""

    ends: list[torch.Tensor] = field(default_factory=list)
    """Scalars with the value zero, from which backward starts as from a loss."""
    beginnings: list[torch.Tensor] = field(default_factory=list)
    """Leaves that backward must reach, since its path to them communicates."""


recordings: list[Recording] = []
"""The active ones of this process."""


def keep_end(zero: torch.Tensor) -> None:
    """Make backward start from ``zero`` too."""
    if zero.requires_grad:
        for recording in recordings:
            recording.ends.append(zero)


def keep_beginning(leaf: torch.Tensor) -> None:
    """Make backward reach ``leaf`` too."""
    if leaf.requires_grad:
        for recording in recordings:
            recording.beginnings.append(leaf)
