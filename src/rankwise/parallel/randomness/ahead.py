# SPDX-License-Identifier: Apache-2.0
"""The small dropout masks of a forward pass, drawn at once when it begins, as the pass before drew them.

Drawn one by one between layers, each takes twice as long: by then the processor's cache holds the code of other things.
The numbers are the same either way, since they are functions of a key and a position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.parallel.randomness.counter import kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.batch_in_hand import BatchInHand

    Mask = tuple[int, int, float]
    """A draw of dropout: its number in the pass, the elements of a sample, and the probability that one is kept."""

LARGEST_AHEAD = 2**16
"""Elements of a mask that is drawn ahead: of larger ones the drawing itself is what takes time."""
MOST_AHEAD = 2**22
"""Elements of all masks that wait to be used."""


def masks_ahead(key: int, expected: Sequence[Mask], rows: BatchInHand) -> dict[Mask, torch.Tensor]:
    """Return masks, each of [rows.num * elements of a sample].

    Args:
        key: of the pass.
        expected: the masks to draw.
        rows: the samples in hand.
    """
    masks: dict[Mask, torch.Tensor] = {}
    left = MOST_AHEAD
    for mask in expected:
        number, size, probability = mask
        count = size * rows.num
        left -= count
        if left < 0:
            break
        if count <= LARGEST_AHEAD:
            masks[mask] = torch.from_numpy(kept((key, number), size * rows.start, count, probability))
    return masks
