# SPDX-License-Identifier: Apache-2.0
"""Which waits can never end, by what every rank says it waits for."""

from __future__ import annotations

from typing import Any

import pytest

from rankwise.health.collective_timeout import deadlocked

ALL, GRADIENTS, FIRST_TWO, LAST_TWO, ENDS = range(5)
MEMBERS = {FIRST_TWO: [0, 1], LAST_TWO: [1, 2], ENDS: [0, 2]}


def _at(blocked: tuple[int, int] | None, *counts: int) -> dict[str, Any]:
    """Return the answer of a rank that waits for a collective, and has begun so many of each exchange."""
    begun = {str(exchange): count for exchange, count in enumerate(counts)}
    if blocked is None:
        return {"blocked": None, "begun": begun}
    exchange, sequence = blocked
    members = MEMBERS.get(exchange)
    return {"blocked": {"exchange": str(exchange), "sequence": sequence, "members": members}, "begun": begun}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([_at((ALL, 3), 3, 5), _at((GRADIENTS, 6), 2, 6)], [0, 1]),
        ([_at((ALL, 3), 3, 5), _at((GRADIENTS, 6), 2, 6), _at((GRADIENTS, 6), 2, 6)], [0, 1, 2]),
        ([_at((ALL, 3), 3, 5), _at((GRADIENTS, 6), 2, 6), _at(None, 2, 5)], [0, 1]),
        # All have begun the collective of rank 1: it ends, and then that rank continues.
        ([_at((ALL, 3), 3, 6), _at((GRADIENTS, 6), 2, 6)], []),
        ([_at((ALL, 3), 3), _at((ALL, 3), 3)], []),
        ([_at((ALL, 3), 3), _at(None, 2)], []),
        ([_at((ALL, 3), 3), {"silent": "stopped"}], []),
        # A rank that does not know of an exchange yet has not begun anything of it.
        ([_at((ALL, 3), 3), _at((GRADIENTS, 1), 2, 1)], [0, 1]),
        # Around a circle of groups; and the same with the last one on its way.
        (
            [_at((FIRST_TWO, 1), 0, 0, 1, 0, 0), _at((LAST_TWO, 1), 0, 0, 0, 1, 0), _at((ENDS, 1), 0, 0, 0, 0, 1)],
            [0, 1, 2],
        ),
        ([_at((FIRST_TWO, 1), 0, 0, 1, 0, 1), _at((LAST_TWO, 1), 0, 0, 0, 1, 0), _at((ENDS, 1), 0, 0, 0, 0, 1)], []),
        # Messages of one rank are not counted.
        ([_at((ALL, 0), 2), _at((GRADIENTS, 6), 2, 6)], []),
    ],
)
def test_ranks_are_stuck_that_wait_for_stuck_ranks(answers: list[dict[str, Any]], expected: list[int]) -> None:
    assert deadlocked(dict(enumerate(answers))) == expected
