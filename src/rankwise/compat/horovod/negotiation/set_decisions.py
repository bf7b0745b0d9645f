# SPDX-License-Identifier: Apache-2.0
"""Which operations of process sets can be carried out, from events that every rank reads in one order.

Pure: every rank applies the same events, and makes the same decisions at the same events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise.compat.horovod.negotiation.matching import Decision, RankState, decide, stalled
from rankwise.compat.horovod.negotiation.request import (
    HAS_JOINED,
    LEAVES,
    POLLS,
    WAITS,
    Key,
    OperationRequest,
    request_from_json,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rankwise.compat.horovod.errors import HorovodInternalError

RUNS, HAS_LEFT = 4, 5
"""Modes of ranks that do not wait: one that may call again, and one that will not."""
_ENDED = (RUNS, HAS_LEFT)


class WaitEvent(NamedTuple):
    """The report of a rank that begins to wait, or stops waiting because of an error."""

    rank: int
    mode: int
    awaited: Key | None = None
    """The operation that it waits for."""
    waits_text: str = ""
    """What it waits for, in words."""
    requests: tuple[OperationRequest, ...] = ()
    """Its requests since its last event."""
    dropped: tuple[Key, ...] = ()
    """The requests that it has withdrawn since its last event."""


class EventOutcome(NamedTuple):
    """The consequences of an event."""

    decisions: Sequence[Decision] = ()
    """The operations that their members carry out now, in this order."""
    stuck: frozenset[int] = frozenset()
    """Ranks whose wait ends with :attr:`error`."""
    error: HorovodInternalError | None = None
    has_all_joined: bool = False


def event_from_json(value: list[Any]) -> WaitEvent:
    """Return the event that JSON turned into a list."""
    rank, mode, awaited, waits_text, requests, dropped = value
    return WaitEvent(
        rank=rank,
        mode=mode,
        awaited=None if awaited is None else _key(awaited),
        waits_text=waits_text,
        requests=tuple(map(request_from_json, requests)),
        dropped=tuple(map(_key, dropped)),
    )


class Negotiation:
    """What every rank waits for and has pending, as of the last event that was applied.

    A rank takes part in an operation only while it waits. That keeps ranks from waiting for one that computes, and
    makes the order of events a safe order for blocking operations: each rank that takes part is about to call it.
    """

    def __init__(self, world_size: int) -> None:
        self._modes = [RUNS] * world_size
        self._awaited: list[Key | None] = [None] * world_size
        self._waits_texts = [""] * world_size
        self._pending: list[dict[Key, OperationRequest]] = [{} for _ in range(world_size)]

    def waits(self, rank: int) -> bool:
        """Return whether a rank waits."""
        return self._modes[rank] not in _ENDED

    def joined(self) -> set[int]:
        """Return the ranks that have called ``join()``."""
        return {rank for rank, mode in enumerate(self._modes) if mode == HAS_JOINED}

    def apply(self, event: WaitEvent, ranks_of_set: Mapping[int, Collection[int]]) -> EventOutcome:
        """Apply the next event, and return its consequences."""
        own = event.rank
        self._modes[own], self._awaited[own], self._waits_texts[own] = event.mode, event.awaited, event.waits_text
        for key in event.dropped:
            self._pending[own].pop(key, None)
        for request in event.requests:
            self._pending[own][request.key] = request
        if event.mode == RUNS:
            return EventOutcome()
        decisions = self._decide(own, ranks_of_set)
        for decision in decisions:
            self._settle(decision.request.key)
        if all(mode == HAS_JOINED for mode in self._modes):
            self._modes = [RUNS] * len(self._modes)
            return EventOutcome(decisions=decisions, has_all_joined=True)
        self._end_of_leaving()
        has_polled = self._release_polls(ranks_of_set)
        if decisions or has_polled:
            return EventOutcome(decisions=decisions)
        return self._stuck_outcome(ranks_of_set, own)

    def blockers(self, rank: int, ranks_of_set: Mapping[int, Collection[int]]) -> set[int]:
        """Return the ranks that have to act before the wait of ``rank`` can end."""
        if self._modes[rank] == HAS_JOINED:
            return set(range(len(self._modes))) - self.joined()
        key = self._awaited[rank]
        request = None if key is None else self._pending[rank].get(key)
        return set() if request is None else self._blockers_of(request, ranks_of_set)

    def holds(self, rank: int, key: Key) -> bool:
        """Return whether a rank has an operation pending, as far as it has reported it."""
        return key in self._pending[rank]

    def _blockers_of(self, request: OperationRequest, ranks_of_set: Mapping[int, Collection[int]]) -> set[int]:
        return {
            rank
            for rank in ranks_of_set[request.set_id]
            if not self.waits(rank)
            or not (request.key in self._pending[rank] or (request.allows_joined and self._modes[rank] == HAS_JOINED))
        }

    def _decide(self, own: int, ranks_of_set: Mapping[int, Collection[int]]) -> list[Decision]:
        """Return the operations that have become ready: those of sets of which every rank waits."""
        waiting = {
            set_id for set_id, ranks in ranks_of_set.items() if own in ranks and all(self.waits(rank) for rank in ranks)
        }
        if not waiting:
            return []
        states = [
            RankState(requests=tuple(request for request in pending.values() if request.set_id in waiting), mode=mode)
            for pending, mode in zip(self._pending, self._modes, strict=True)
        ]
        return decide(states, ranks_of_set)

    def _settle(self, key: Key) -> None:
        for rank, pending in enumerate(self._pending):
            held = pending.pop(key, None)
            if held is not None and self._awaited[rank] == key and self._modes[rank] in {WAITS, POLLS}:
                self._modes[rank] = RUNS

    def _end_of_leaving(self) -> None:
        for rank, mode in enumerate(self._modes):
            if mode == LEAVES and not self._pending[rank]:
                self._modes[rank] = HAS_LEFT

    def _release_polls(self, ranks_of_set: Mapping[int, Collection[int]]) -> bool:
        """End the calls of ``poll`` for which nothing more can happen: every rank of the set waits or has left."""
        released = [
            rank
            for rank, (mode, awaited) in enumerate(zip(self._modes, self._awaited, strict=True))
            if mode == POLLS
            and (awaited is None or all(self._modes[other] != RUNS for other in ranks_of_set[awaited[0]]))
        ]
        for rank in released:
            self._modes[rank] = RUNS
        return bool(released)

    def _stuck_outcome(self, ranks_of_set: Mapping[int, Collection[int]], own: int) -> EventOutcome:
        """End the waits that nothing else can end: of ranks that wait for each other, or for one that has left."""
        if self._modes[own] == WAITS and all(
            self._modes[rank] in {RUNS, POLLS} for rank in self.blockers(own, ranks_of_set)
        ):
            return EventOutcome()
        alive = {rank for rank, mode in enumerate(self._modes) if mode in {RUNS, POLLS}}
        waiting = [rank for rank, mode in enumerate(self._modes) if mode in {WAITS, HAS_JOINED}]
        while freed := {r for r in waiting if r not in alive and self.blockers(r, ranks_of_set) <= alive}:
            alive |= freed
        stuck = {rank for rank in waiting if rank not in alive}
        leaving = [
            rank
            for rank, mode in enumerate(self._modes)
            if mode == LEAVES
            and not any(self._blockers_of(request, ranks_of_set) <= alive for request in self._pending[rank].values())
        ]
        error = None
        if stuck:
            states = {
                rank: RankState(requests=tuple(self._pending[rank].values()), mode=mode, waits=self._waits_texts[rank])
                for rank, mode in enumerate(self._modes)
            }
            awaited = {other for rank in stuck for other in self.blockers(rank, ranks_of_set)}
            ended = {rank for rank in awaited if self._modes[rank] in {LEAVES, HAS_LEFT}}
            error = stalled(states, ranks_of_set, stuck, ended)
        for rank in stuck:
            key = self._awaited[rank]
            if key is not None:
                self._pending[rank].pop(key, None)
            self._modes[rank] = RUNS
        for rank in leaving:
            self._pending[rank].clear()
            self._modes[rank] = HAS_LEFT
        return EventOutcome(stuck=frozenset(stuck), error=error)


def _key(value: list[Any]) -> Key:
    set_id, name = value
    return int(set_id), str(name)
