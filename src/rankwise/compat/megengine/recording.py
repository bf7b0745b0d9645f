# SPDX-License-Identifier: Apache-2.0
"""What a recording GradManager has to go through besides the losses it is given.

What a rank sends has no use on that rank, and what it receives depends on nothing there: backward would miss both.
Imported by ``distributed.functional``, which notes them, and by the GradManager, which records.
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
    """Scalars that count as zero, from which backward starts as from a loss."""
    beginnings: list[torch.Tensor] = field(default_factory=list)
    """Leaves that backward must come to, for what it does on the way."""


recordings: list[Recording] = []
"""Those under way in this process."""


def keep_end(zero: torch.Tensor) -> None:
    """Have backward start from ``zero`` too."""
    if zero.requires_grad:
        for recording in recordings:
            recording.ends.append(zero)


def keep_beginning(leaf: torch.Tensor) -> None:
    """Have backward come to ``leaf`` too."""
    if leaf.requires_grad:
        for recording in recordings:
            recording.beginnings.append(leaf)
