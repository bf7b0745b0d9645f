# SPDX-License-Identifier: Apache-2.0
"""Places in shared memory where the ranks of a host wait for each other, each with a few numbers for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.comm.backends.engine import Counters
from rankwise.comm.backends.mapping import LINE_BYTES, WORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.comm.backends.engine import Engine
    from rankwise.comm.backends.mapping import Mapping
    from rankwise.errors import RankwiseError

NUM_NUMBERS = LINE_BYTES // WORD_BYTES
_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory that the ranks of one host share."""

    mapping: Mapping
    engine: Engine
    local_rank: int
    ranks: list[int]
    """The world's numbers of the ranks of this host."""
    exchange_id: int


class Meeting:
    """Where the ranks of a host meet, in an order that is the same on all of them."""

    def __init__(self, memory: HostMemory, start: int, past: Callable[[int], RankwiseError]) -> None:
        """Take a part of the memory.

        Args:
            memory: of the ranks.
            start: the first byte of :meth:`num_bytes`, all of them zero.
            past: returns the error for a rank that has noted more progress than this rank, and is not here: it does
                not come.
        """
        num_ranks = len(memory.ranks)
        self._memory = memory
        self._words = memory.mapping.words
        self._counters = Counters(memory.mapping, start, memory.local_rank, num_ranks)
        lines = [start // WORD_BYTES + NUM_NUMBERS * line for line in range(4 * num_ranks)]
        self._numbers = lines[num_ranks : 2 * num_ranks], lines[2 * num_ranks : 3 * num_ranks]
        """In turn: a rank may be at the next meeting before the others have read the numbers of this one."""
        self._progress = lines[3 * num_ranks :]
        self._round = 0
        self._is_here = True
        """Whether this rank has reached the latest meeting."""
        self._past = past

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """Return how much memory it takes."""
        return 4 * LINE_BYTES * num_ranks

    def note_progress(self, number: int) -> None:
        """Note how far this rank has come elsewhere: a number that is the same on all ranks whenever they meet."""
        self._words[self._progress[self._memory.local_rank]] = number

    def meet(self, what: str, numbers: Sequence[int]) -> list[list[int]]:
        """Wait until every rank of the host is here; return the numbers of all, in the order of their local ranks.

        Called by: every rank of the host.

        Args:
            what: names the meeting in errors, on every rank alike.
            numbers: up to ``NUM_NUMBERS``, of up to 63 bits.

        Raises:
            PeerFailed, PeerMissing: a rank has failed, or does not come.
        """
        memory = self._memory
        self._round += 1
        self._is_here = False
        places = self._numbers[self._round % 2]
        own = places[memory.local_rank]
        for place, number in enumerate(numbers, own):
            self._words[place] = number & _MASK
        ticket = memory.engine.detector.ticket(what, memory.exchange_id)
        self._is_here = True
        self._counters.post(self._round)
        operation = memory.engine.start(iter(((_AllHere(self._counters, self._check_progress), self._round),)))
        memory.engine.wait(operation, ticket)
        return [self._words[place : place + len(numbers)].tolist() for place in places]

    def all_have_come(self) -> bool:
        """Return whether every rank has reached the latest meeting: others may have gone on from there."""
        return self._is_here and self._counters.reach(self._round)

    def _check_progress(self) -> None:
        own = self._words[self._progress[self._memory.local_rank]]
        for local_rank, place in enumerate(self._progress):
            # It notes its progress after it was here: first the one, then the other.
            if self._words[place] > own and not self._counters.reach(self._round):
                raise self._past(self._memory.ranks[local_rank])


class _AllHere:
    """The progress of the ranks of the host, unless one cannot come any more."""

    def __init__(self, counters: Counters, check: Callable[[], None]) -> None:
        self._counters, self._check = counters, check
        self.sleep_until, self.last = counters.sleep_until, counters.last

    def reach(self, value: int) -> bool:
        """Return whether all have come. Raises if one cannot come any more."""
        if self._counters.reach(value):
            return True
        self._check()
        return False
