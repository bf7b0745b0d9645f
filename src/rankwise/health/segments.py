# SPDX-License-Identifier: Apache-2.0
"""A step as consecutive segments of time, each of one part, and the row of numbers that they add up to.

The same for segments that the host's clock has measured and for those that a device has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.health.step_record import (
    ARRIVAL,
    CHECKPOINT,
    DATA,
    EVALUATION,
    EXCHANGE,
    LATE_EXCHANGE,
    OPTIMIZER,
    PARTS,
    SCRIPT,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

ARRIVED, READ_FOR_EVALUATION = -1, -2
"""In place of a part, without a duration: the gradients of this rank were computed; what was read so far in this step
was for an evaluation."""
_AFTER_EXCHANGE = frozenset((OPTIMIZER, CHECKPOINT))
"""The parts that follow the exchange of gradients: waiting within them is for ranks that take longer for them."""


def add_segments(row: list[float], segments: Iterable[tuple[int, float]]) -> None:
    """Add segments of a step, each a part and its seconds, to the numbers of the step so far."""
    total = sum(row[: len(PARTS)])
    around = SCRIPT
    for part, seconds in segments:
        if part == ARRIVED:
            row[ARRIVAL] = total
        elif part == READ_FOR_EVALUATION:
            row[EVALUATION] += row[DATA]
            row[DATA] = 0.0
        else:
            if part != EXCHANGE:
                around = part
            elif around in _AFTER_EXCHANGE:
                row[LATE_EXCHANGE] += seconds
            elif not row[ARRIVAL]:
                row[ARRIVAL] = total
            row[part] += seconds
            total += seconds
