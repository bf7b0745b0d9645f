# SPDX-License-Identifier: Apache-2.0
"""Which ranks wait for each other, each in another collective: such a wait never ends.

Values in, values out. Used while a rank waits, as soon as all ranks do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.health.diagnosis import Answers


def deadlocked(answers: Answers, is_member: Callable[[int, int], bool]) -> list[int]:
    """Return the ranks that wait for each other, in order; empty if each may still continue.

    A collective ends once all its members have begun it. So a rank is stuck if the thread that trains waits in one
    that a stuck rank has not begun. This holds although the answers are not of the same moment: what a stuck rank has
    begun does not change between them.

    Args:
        answers: of a status poll.
        is_member: whether a rank takes part in the collectives of an exchange, by number.
    """
    stuck = {rank: answer["blocked"] for rank, answer in answers.items() if answer.get("blocked")}

    def is_awaited(rank: int, exchange_id: int, sequence: int) -> bool:
        # A wait without a number is for a message of one rank, which may be on its way.
        return sequence > 0 and is_member(rank, exchange_id) and _count(answers[rank]["counts"], exchange_id) < sequence

    while True:
        still = {rank: on for rank, on in stuck.items() if any(is_awaited(other, *on) for other in stuck)}
        if len(still) == len(stuck):
            return sorted(still)
        stuck = still


def _count(counts: list[int], exchange_id: int) -> int:
    """Return how many collectives of an exchange a rank has begun; it may not know of the exchange yet."""
    return counts[exchange_id] if exchange_id < len(counts) else 0
