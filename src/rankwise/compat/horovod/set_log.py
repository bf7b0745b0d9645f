# SPDX-License-Identifier: Apache-2.0
"""The log in the job's store by which ranks match operations while there are process sets of some of the ranks.

A rank that begins to wait appends its requests and the one it waits for, and reads until its wait is over. All ranks
read the same events in the same order, so no replies are needed, and only the ranks of its own sets wait for a rank
that computes.
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise.compat.horovod.request import (
    HAS_JOINED,
    LEAVES,
    POLLS,
    WAITS,
    Decision,
    Key,
    OperationRequest,
    RankState,
    decide,
    request_from_json,
    stalled,
)
from rankwise.errors import PeerMissing, fold_ranks
from rankwise.health import diagnosis
from rankwise.health.collective_timeout import NOTICE_SECONDS, SLICE_SECONDS
from rankwise.log import warn
from rankwise.store.client import StoreLost

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from rankwise.compat.horovod.exceptions import HorovodInternalError
    from rankwise.compat.horovod.request import Key, PendingOperation
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.store.client import Store
    from rankwise.world.facts import World

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


BATCH = 64
"""The number of events that are read, or keys that are deleted, at a time."""
_MANY_BEHIND = 4
"""After this many events of others, a rank that appends checks whether it is a whole batch behind."""


class SetLog:
    """This rank's end of the log, from the first process set of some of the ranks until there is none.

    Its many fields are this rank's position in the log: what it has written, what it has read, and what that decided.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        detector: FailureDetector,
        number: int,
        ranks_of_set: Callable[[], Mapping[int, tuple[int, ...]]],
    ) -> None:
        """Begin to follow an empty log. Called by: every rank, with the same number."""
        self.sent: set[Key] = set()
        """Operations that are pending here and have been reported to the other ranks."""
        self.withdrawn: dict[Key, PendingOperation] = {}
        """Operations that were withdrawn here: they may have been decided on before the others are notified."""
        self._world, self._detector, self._store = world, detector, store
        self._ranks_of_set = ranks_of_set
        self._prefix = f"rankwise/horovod/{number}"
        self._rank = world.rank
        self._negotiation = Negotiation(world.world_size)
        self._num_read = 0
        self._num_written = 0
        self._latest = [0] * world.world_size
        """The number of each rank's latest event: it has read everything before."""
        self._own: deque[int] = deque()
        # A channel that is not compared between ranks: each rank may wait any number of times.
        self._exchange_id = detector.recorder.new_exchange_id(())

    def joined(self) -> set[int]:
        """Return the ranks that have called ``join()``."""
        return self._negotiation.joined()

    def wait(self, event: WaitEvent, carry_out: Callable[[WaitEvent, EventOutcome], bool], called: str) -> None:
        """Report an event of this rank, and carry out decided operations until its wait is over.

        Called by: any rank; all members of an operation that is decided are in this call. ``carry_out`` carries out
        decided operations, and returns whether the wait is over for another reason. ``called`` names the call that
        waits.
        """
        ticket = self._detector.recorder.begin(called, self._exchange_id)
        try:
            if self._report(event, carry_out):
                return
            self._follow(event, carry_out, called)
        except BaseException:
            self._stop_waiting(carry_out)
            raise
        finally:
            ticket.end()

    def _follow(self, event: WaitEvent, carry_out: Callable[[WaitEvent, EventOutcome], bool], called: str) -> None:
        start, notice = time.monotonic(), NOTICE_SECONDS
        departed: list[int] = []
        while self._negotiation.waits(self._rank):
            text = self._next()
            if text is not None:
                if self._apply(text, carry_out):
                    return
                continue
            waited = time.monotonic() - start
            missing = sorted(self._negotiation.blockers(self._rank, self._ranks_of_set()))
            # A failed rank departs a moment before its error is posted: check twice.
            before, departed = departed, [rank for rank in missing if self._detector.departed(rank)]
            self._check([rank for rank in departed if rank in before], missing, waited, called, event)
            if waited > notice:
                notice *= 2
                warn(f"{called} has waited {waited:.0f} s. {self._missing_text(missing, event)}", all_ranks=True)

    def _next(self) -> bytes | None:
        """Return the next event, or ``None`` if none came within a fraction of a second."""
        if self._detector.error is not None:
            raise self._detector.error
        try:
            text = self._store.get(self._key(self._num_read + 1), SLICE_SECONDS)
        except TimeoutError:
            return None
        except StoreLost:
            raise self._detector.error or diagnosis.store_lost(self._world) from None
        self._num_read += 1
        return text

    def _apply(self, text: bytes, carry_out: Callable[[WaitEvent, EventOutcome], bool]) -> bool:
        event = event_from_json(json.loads(text)[0])
        self._latest[event.rank] = self._num_read
        return carry_out(event, self._negotiation.apply(event, self._ranks_of_set()))

    def _report(self, event: WaitEvent, carry_out: Callable[[WaitEvent, EventOutcome], bool]) -> bool:
        """Append an event, and apply all events up to it. Returns what ``carry_out`` returned for it."""
        self._num_written += 1
        text = json.dumps([event, self._num_written])
        is_over = False
        for held in self._append(text):
            if held == text.encode():
                self._own.append(self._num_read)
                for key in event.dropped:
                    self.withdrawn.pop(key, None)
            is_over = self._apply(held, carry_out)
        self._delete_what_all_have_read()
        return is_over

    def _append(self, text: str) -> Iterator[bytes]:
        """Yield the events that other ranks have appended before, and the text itself last."""
        num_others = 0
        try:
            while True:
                if num_others >= _MANY_BEHIND:
                    num_others = 0
                    while self._store.check(self._key(self._num_read + BATCH)):
                        first = self._num_read + 1
                        for held in self._store.get_all([self._key(first + number) for number in range(BATCH)]):
                            self._num_read += 1
                            yield held
                held = self._store.held_or_set(self._key(self._num_read + 1), text)
                self._num_read += 1
                num_others += 1
                yield held
                if held == text.encode():
                    return
        except StoreLost:
            raise self._detector.error or diagnosis.store_lost(self._world) from None

    def _delete_what_all_have_read(self) -> None:
        if len(self._own) < 2 * BATCH:
            return
        read_by_all = min(self._latest)
        try:
            while self._own and self._own[0] < read_by_all:
                self._store.delete(self._key(self._own.popleft()))
        except StoreLost:
            raise self._detector.error or diagnosis.store_lost(self._world) from None

    def _stop_waiting(self, carry_out: Callable[[WaitEvent, EventOutcome], bool]) -> None:
        """Report that an error has ended this rank's wait: the others must not expect it to take part."""
        if not self._negotiation.waits(self._rank) or self._detector.error is not None:
            return
        try:
            self._report(WaitEvent(rank=self._rank, mode=RUNS), carry_out)
        except Exception as error:  # noqa: BLE001 - the error that ended the wait is the one to raise
            warn(f"the other ranks could not be notified that this rank stopped waiting: {error}", all_ranks=True)

    def _check(self, departed: list[int], missing: list[int], waited: float, called: str, event: WaitEvent) -> None:
        if departed:
            error = next((loss for rank in departed if (loss := self._detector.loss_of(rank)) is not None), None)
            raise error or PeerMissing(
                f"{called} cannot complete: {fold_ranks(departed)} has left.",
                ranks=departed,
                where=str(self._world),
                do="let every rank of the process set call it before it leaves",
            )
        if waited > self._detector.timeout_seconds:
            raise PeerMissing(
                f"{called} timed out after {waited:.1f} s waiting for {fold_ranks(missing)}.",
                ranks=missing,
                where=str(self._world),
                evidence=self._missing_text(missing, event),
                do="make sure the missing rank calls it too; for longer waits set join(timeout_seconds=...)",
            )

    def _missing_text(self, missing: list[int], event: WaitEvent) -> str:
        """Return which ranks have not called it, and which have but do not wait for it."""
        key = event.awaited
        called_here = [rank for rank in missing if key is not None and self._negotiation.holds(rank, key)]
        absent = [rank for rank in missing if rank not in called_here]
        texts = [f"{fold_ranks(absent)}: not called yet."] if absent else []
        texts += [f"{fold_ranks(called_here)}: called, and not waited for."] if called_here else []
        return " ".join(texts)

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"
