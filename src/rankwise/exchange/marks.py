# SPDX-License-Identifier: Apache-2.0
"""How far each rank of a host has come: a counter per rank in shared memory, written by that rank only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.exchange import futex
from rankwise.exchange.mapping import LINE_BYTES, WORD_BYTES

if TYPE_CHECKING:
    from rankwise.exchange.mapping import Mapping


class Marks:
    """Counters that only grow. Legend: L ranks of this host."""

    def __init__(self, mapping: Mapping, start: int, rank: int, num_ranks: int) -> None:
        self._words = mapping.words
        places = [start + LINE_BYTES * other for other in range(num_ranks)]
        self._addresses = [mapping.address + place for place in places]
        self._own = places[rank] // WORD_BYTES
        self._own_address = self._addresses[rank]
        self._others = [(other, places[other] // WORD_BYTES) for other in range(num_ranks) if other != rank]

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """Return how much memory the counters of ``num_ranks`` take."""
        return LINE_BYTES * num_ranks

    def post(self, value: int) -> None:
        """Move this rank's counter; whoever sleeps on it wakes up."""
        self._words[self._own] = value
        futex.wake(self._own_address)

    def reach(self, value: int) -> bool:
        """Return whether every other rank has come to ``value``."""
        words = self._words
        return all(words[place] >= value for _, place in self._others)

    def last(self, value: int) -> int | None:
        """Return a rank of this host that has not come to ``value``."""
        return next((other for other, place in self._others if self._words[place] < value), None)

    def sleep_until(self, value: int, seconds: float) -> None:
        """Sleep until one of those that have not come to ``value`` moves, for at most ``seconds``."""
        for other, place in self._others:
            held = self._words[place]
            if held < value:
                futex.sleep_while(self._addresses[other], held, seconds)
                return
