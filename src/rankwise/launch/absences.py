# SPDX-License-Identifier: Apache-2.0
"""Ends the wait for ranks that have ended before they joined: the others need not wait for their whole time limit.

Writes into the job's store on the loop that serves it. Imported by the launcher's serving end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.events import WORLDS_KEY, world_prefix
from rankwise.rendezvous import ENDED, place_key

if TYPE_CHECKING:
    from rankwise.store.keys import Keys

TORCH_PREFIX = "torch/"
"""Begins the keys of the group that ranks open by torch's own ``env://``, among those of an attempt."""


def torch_rank_key(rank: int) -> str:
    """Return the key that a rank sets, among those of an attempt, when it begins to open torch's own group."""
    return f"rankwise/torch_ranks/{rank}"


class Absences:
    """The ranks of one attempt that have ended without an error, in each world that the others join.

    Args:
        of_job: the keys of the job.
        attempt: its number.
    """

    def __init__(self, of_job: Keys, attempt: int) -> None:
        self.attempt = attempt
        self._keys = of_job
        self._prefix = f"attempt/{attempt}/"
        self._ended: list[int] = []
        self._num_followed = 0

    def note_ended(self, rank: int) -> None:
        """Take in that a rank has ended without an error."""
        self._ended.append(rank)
        self._num_followed = 0
        if not self._keys.check([self._prefix + torch_rank_key(rank)]):
            why = f"rank {rank} ended without an error before it called init_process_group()"
            self._keys.give_up(self._prefix + TORCH_PREFIX, rank, why)
        self.follow()

    def follow(self) -> None:
        """Mark the ranks that have ended in the worlds that others have begun to join since, too."""
        num_worlds = int(self._keys.peek(self._prefix + WORLDS_KEY) or 0) + 1
        for number in range(self._num_followed, num_worlds):
            world = f"{self._prefix}{world_prefix(number)}/" if number else self._prefix
            for rank in self._ended:
                # Who has joined has a place there already, and keeps it.
                self._keys.compare_set(world + place_key(rank), b"", ENDED.encode())
        self._num_followed = num_worlds
