# SPDX-License-Identifier: Apache-2.0
"""Which ranks wait for each other, each in another collective: such a wait never ends.

Values in, values out. Used while a rank waits, as soon as all ranks do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankwise.health.diagnosis import Answers


def deadlocked(answers: Answers) -> list[int]:
    """Return the ranks that wait for each other, in order; empty if each may still continue.

    A collective ends once all its members have begun it. So a rank is stuck if the thread that trains waits in one
    that a stuck rank has not begun. This holds although the answers are not of the same moment: what a stuck rank has
    begun does not change between them.

    Args:
        answers: of a status poll.
    """
    stuck = {rank: answer["blocked"] for rank, answer in answers.items() if answer.get("blocked")}
    while True:
        still = {
            rank: wait
            for rank, wait in stuck.items()
            if any(_is_awaited(other, answers[other]["begun"], wait) for other in stuck)
        }
        if len(still) == len(stuck):
            return sorted(still)
        stuck = still


def _is_awaited(rank: int, begun: dict[str, int], wait: dict[str, Any]) -> bool:
    """Return whether a wait cannot end before a rank, which has begun so many of each exchange, begins it too."""
    # A wait without a number is for a message of one rank, which may be on its way.
    is_member = wait["members"] is None or rank in wait["members"]
    return wait["sequence"] > 0 and is_member and begun.get(wait["exchange"], 0) < wait["sequence"]
