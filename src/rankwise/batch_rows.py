# SPDX-License-Identifier: Apache-2.0
"""Which samples of a global batch a rank has in hand. A loader notes them; random numbers are drawn by them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchRows:
    """A rank's part of one global batch."""

    num: int
    """Samples of this rank; 0 where nothing of a short batch was left for it."""
    num_global: int
    """Samples of all ranks together."""
    start: int
    """Which of them is this rank's first."""
    batch: object = None
    """What the loader gave for them, so that tensors made of it are known."""
