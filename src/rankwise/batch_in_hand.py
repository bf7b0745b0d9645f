# SPDX-License-Identifier: Apache-2.0
"""The batch that a training loop has in hand, and which samples of the global batch it holds.

A loader notes it; random numbers are drawn by it, and ranks compare it when they run backward.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchInHand:
    """A rank's part of one global batch."""

    loader: int
    """Number of the loader that gave it, the same on every rank; 0 where none did."""
    epoch: int
    number: int
    """Of the global batch, within the epoch."""
    num: int
    """Samples of this rank; 0 where nothing of a short batch was left for it."""
    num_global: int
    """Samples of all ranks together."""
    start: int
    """Which of them is this rank's first."""
    values: object = None
    """What the loader gave, so that tensors made of it are known."""
    thread: int = 0
    """Which took it."""
