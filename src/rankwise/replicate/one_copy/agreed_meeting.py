# SPDX-License-Identifier: Apache-2.0
"""Meetings of the ranks of a host that take place for all of them or for none, even if some fail on the way.

A rank that cannot wait any longer says so in shared memory, and only then looks who has arrived: if some rank has not,
the meeting does not take place. A rank that has seen all arrive then looks who has left in this way. Each writes before
it reads, with the barrier of a system call in between, so at least one of two ranks sees the other: a rank that left
because it saw too few is seen by all that later see enough. The words outlive a rank that is killed.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from rankwise.comm.backends.engine import Counters, Meeting
from rankwise.comm.backends.mapping import LINE_BYTES, WORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.comm.backends.engine import HostMemory
    from rankwise.errors import RankwiseError

_LEAVES, _SAW_ALL, _SAW_TOO_FEW = 1, 2, 3
"""What a rank notes that leaves a meeting: that it does, and what it then sees."""
_KINDS = 4
"""A word is the number of the meeting times this, and the kind of the note."""


class AgreedMeeting:
    """Where the ranks of a host meet, in an order that is the same on all of them."""

    def __init__(self, memory: HostMemory, start: int, past: Callable[[int], RankwiseError]) -> None:
        """Take a part of the memory, as :class:`Meeting` does."""
        num_ranks, own = len(memory.ranks), memory.local_rank
        first = start + Meeting.num_bytes(num_ranks)
        self._memory = memory
        self._meeting = Meeting(memory, start, past)
        self._words = memory.mapping.words
        self._notes = Counters(memory.mapping, first, own, num_ranks)
        self._others = [(one, (first + LINE_BYTES * one) // WORD_BYTES) for one in range(num_ranks) if one != own]
        self.note_progress = self._meeting.note_progress
        self.number = 0
        """Of the latest meeting of this rank; the first is 1."""
        self._took_place: bool | None = None
        """Whether the latest one did; ``None`` while that is open."""

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """Return how much memory it takes."""
        return Meeting.num_bytes(num_ranks) + Counters.num_bytes(num_ranks)

    def meet(self, what: str, numbers: Sequence[int]) -> list[list[int]]:
        """Wait until every rank of the host is here; return the numbers of all. See :meth:`Meeting.meet`.

        After an error this rank must not meet the others again, except if it is an error on all of them.

        Called by: every rank of the host.
        """
        self._took_place = None
        self.number += 1
        rows = self._meeting.meet(what, numbers)
        for _, place in self._others:
            if self._words[place] > self.number * _KINDS:
                self._took_place = self._is_held()
                if not self._took_place:
                    # The rank that has left never arrives: this raises the reason, once it is known.
                    self._meeting.meet(what, numbers)
        self._took_place = True
        return rows

    def took_place(self, number: int) -> bool:
        """Return whether a meeting took place; the same on every rank of the host that has left it or passed it.

        A rank that asks about its latest one while that is open leaves it, and must not meet the others again.
        """
        if number != self.number:
            return number < self.number
        if self._took_place is None:
            self._notes.post(number * _KINDS + _LEAVES)
            sees_all = self._meeting.all_have_come(number)
            self._notes.post(number * _KINDS + (_SAW_ALL if sees_all else _SAW_TOO_FEW))
            self._took_place = sees_all and self._is_held()
        return self._took_place

    def _is_held(self) -> bool:
        """Return whether a meeting is held at which all have arrived: unless one has left that saw too few."""
        open_note = self.number * _KINDS + _LEAVES
        limit = time.monotonic() + self._memory.engine.detector.timeout_seconds
        for rank, place in self._others:
            # The note is open for a few instructions only; a rank that is killed within them leaves it open for all.
            while self._words[place] == open_note and time.monotonic() < limit:
                if self._memory.engine.peers.has_ended(rank):
                    break
                os.sched_yield()
        return all(self._words[place] != self.number * _KINDS + _SAW_TOO_FEW for _, place in self._others)
