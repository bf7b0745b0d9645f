# SPDX-License-Identifier: Apache-2.0
"""A thread per rank that follows the job's event log, so that nothing hangs in silence.

Ranks write events to the store: a failure, a departure, a roll call, a verdict on who is missing. The thread
reads them in order; whoever waits for a collective looks here. Never touches the process group.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TYPE_CHECKING, Any

from rankwise import blame, last_call, roll_call, silent
from rankwise.errors import RankwiseError
from rankwise.events import key_of, post, post_departure, post_failure
from rankwise.forking import hold_during_forks
from rankwise.log import warn
from rankwise.record import Record, with_kind
from rankwise.stopping import Stopping
from rankwise.store import StoreLost

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch

    from rankwise.record import Ticket
    from rankwise.store import Store
    from rankwise.world import World

SLICE_SECONDS = 0.2
"""How long a rank waits for a collective before it looks at the log again."""
END_SECONDS = 2.0
"""How long a rank that ends waits for its thread, and after a failure for the others."""
EXPLANATION_SECONDS = 1.0
"""How long a rank with a broken connection waits for the reason before it asks."""
VERDICT_SECONDS = 10.0
"""How long a rank waits for what another finds out: two roll calls, and a look at ranks that are silent."""
NOTICE_SECONDS = 30.0
"""After how long a wait is mentioned, with who is missing."""
NO_LIMIT_SECONDS = 10.0**8


class PeerEnded(RuntimeError):
    """The process of a rank that is waited for has ended."""

    def __init__(self, rank: int, process: int) -> None:
        super().__init__(f"process {process} of rank {rank} has ended")
        self.rank = rank
        self.process = process


class Watch:
    """Follows the event log for one rank, from join to leave."""

    def __init__(self, store: Store, world: World, timeout_seconds: float, stack_file: str = "") -> None:
        self.timeout_seconds = timeout_seconds
        self.hostname = world.hostname
        self.world_size = world.world_size
        self.record = Record(last_call.opened(last_call.path_beside(stack_file)))
        self.check: Callable[[str], None] | None = None
        """Compares the words of a collective on all ranks before it begins, where that was asked for."""
        self.error: RankwiseError | None = None
        self.stopping = Stopping(
            rank=world.rank,
            world_size=world.world_size,
            store=store,
            timeout_seconds=timeout_seconds,
            error=lambda: self.error,
        )
        self._world = world
        self._store = store.clone()
        self._departed: dict[int, dict[str, Any]] = {}
        self._expendable: set[int] = set()
        self._changed = threading.Condition()
        hold_during_forks(self._changed)
        self._waiting: Ticket | None = None
        self._is_checking = False
        self._next_event = 1
        self._main_thread_id = threading.get_ident()
        roll_call.introduce(self._store, world.rank, silent.this_process(stack_file))
        self._thread = threading.Thread(target=self._follow, args=(store.clone(),), name="rankwise-watch", daemon=True)
        self._thread.start()

    def ticket(self, what: str, channel: int = 0, tensor: torch.Tensor | None = None) -> Ticket:
        """Note that one more collective begins, and return its ticket.

        Args:
            what: in words; the same on every rank.
            channel: see :class:`rankwise.record.Ticket`.
            tensor: what this rank sends, for ranks to compare where ``what`` does not say its shape and dtype.
        """
        if self.error is not None:
            raise self.error
        if self.check is not None and not self._is_checking and self._is_of_all(channel):
            self._is_checking = True
            try:
                self.check(what if tensor is None else with_kind(what, tensor))
            finally:
                self._is_checking = False
        return self.record.begin(what, channel)

    def wait(self, ticket: Ticket, is_done: Callable[[float], bool]) -> None:
        """Wait until ``is_done(seconds)`` returns true, unless a peer fails, leaves or stays away.

        Args:
            ticket: what is waited for.
            is_done: waits for at most the given seconds and returns whether the collective is done.

        Raises:
            PeerFailed, PeerMissing, CollectiveMismatch: with the rank; the same on every waiting rank.
        """
        self._waiting = ticket
        start = time.monotonic()
        notice = NOTICE_SECONDS
        try:
            while not is_done(SLICE_SECONDS):
                waited = time.monotonic() - start
                if waited > 1.0 or self.error is not None:
                    pointless = self._why_pointless(ticket)
                    if pointless is not None:
                        raise pointless
                if waited > self.timeout_seconds:
                    self._post_verdict(ticket, waited)
                elif waited > notice:
                    notice *= 2
                    self._say_who_is_missing(ticket, waited)
            ticket.ended = time.monotonic()
        except PeerEnded as ended:
            raise self._tell_who_ended(ticket, ended) from None
        except StoreLost:
            self._store.close()  # to say that this rank fails would take as long again
            raise self.error or blame.store_lost(self._world) from None
        except RuntimeError as error:
            if isinstance(error, RankwiseError) or blame.is_of_a_signal_handler(error):
                raise
            reason = self._explain(ticket, error)
            # What a peer did explains the broken connection; torch's words on it would only stand in the way.
            raise reason from None
        finally:
            self._waiting = None

    def reason_of(self, error: BaseException) -> RankwiseError | None:
        """Return what another rank's failure is told by, where ``error`` is only a connection that broke because of it.

        Args:
            error: what this rank is about to end with; perhaps of a collective that torch waited for itself.
        """
        if isinstance(error, RankwiseError) or not blame.is_of_a_connection(error):
            return None
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None, EXPLANATION_SECONDS)
            return self.error or next(map(self._error_of, self._lost()), None)

    def departed(self, rank: int) -> bool:
        """Return whether ``rank`` has left, or has failed and may be gone on without."""
        return rank in self._departed

    def loss_of(self, rank: int) -> RankwiseError | None:
        """Return what the failure of ``rank`` is told by, where the job goes on without it."""
        return self._error_of(rank) if rank in self._lost() else None

    @property
    def has_lost_ranks(self) -> bool:
        """Whether the job goes on without ranks that have failed: what they never came to may be under way still."""
        return bool(self._lost())

    def leave(self, *, wait_for_peers: bool) -> None:
        """Say that this rank is done, and stop the thread.

        Args:
            wait_for_peers: stay until every other rank has left or failed too: who serves the store goes last.
        """
        # From here on the store may go before this rank's thread has read its own departure: that is no failure.
        self._departed.setdefault(self._world.rank, {"kind": "left", "rank": self._world.rank})
        with contextlib.suppress(StoreLost):
            roll_call.take_leave(self._store, self._world.rank)
            post_departure(self._store, rank=self._world.rank, last=self.record.last, counts=self.record.counts)
            self._end((self.timeout_seconds if self.error is None else END_SECONDS) if wait_for_peers else 0.0)

    def fail(self, error_type: str, text: str, *, wait_for_peers: bool) -> None:
        """Tell every rank that this one failed, and stop the thread; else as :meth:`leave`."""
        with contextlib.suppress(StoreLost):
            roll_call.take_leave(self._store, self._world.rank)
            post_failure(
                self._store,
                rank=self._world.rank,
                error_type=error_type,
                text=text,
                hostname=self._world.hostname,
            )
            self._end(END_SECONDS if wait_for_peers else 0.0)

    def _end(self, limit_seconds: float) -> None:
        """Wait for the others to go, then have the thread read its own end."""
        deadline = time.monotonic() + limit_seconds
        silent_ranks: set[int] = set()
        while (left := deadline - time.monotonic()) > 0 and (others := self._still_there() - silent_ranks):
            may_go = others <= self._expendable
            with self._changed:
                has_changed = self._changed.wait_for(
                    lambda now=others: self._still_there() - silent_ranks != now,
                    min(left, END_SECONDS) if may_go else left,
                )
            if may_go and not has_changed:
                # Of a rank that may go, perhaps nobody has said that it went.
                silent_ranks.update(blame.unheard(self._roll_call(without=silent_ranks), others))
        post(self._store, {"kind": "end", "rank": self._world.rank}, self._next_event)
        # A thread inside torch while the interpreter ends would abort the process.
        self._thread.join(END_SECONDS)

    def _still_there(self) -> set[int]:
        return set(range(self.world_size)) - self._departed.keys() - {self._world.rank}

    # -- the thread --------------------------------------------------------------------------------

    def _follow(self, store: Store) -> None:
        try:
            while True:
                event = json.loads(store.get(key_of(self._next_event), timeout_seconds=NO_LIMIT_SECONDS))
                self._next_event += 1
                with self._changed:
                    ended = self._read(store, event)
                    self._changed.notify_all()
                if ended:
                    return
        except (StoreLost, TimeoutError):
            with self._changed:
                if self.error is None and self._world.rank not in self._departed:
                    self.error = blame.store_lost(self._world)
                self._changed.notify_all()

    def _read(self, store: Store, event: dict[str, Any]) -> bool:
        """Take one event in; return whether it is this rank's own end."""
        kind, rank = event["kind"], event["rank"]
        self.stopping.read(store, event, self._next_event)
        if kind == "failed":
            self._departed.setdefault(rank, event)
            if rank != self._world.rank:
                self._take_loss(store, event, [rank])
        elif kind == "expendable":
            self._expendable.update(event["ranks"])
        elif kind == "left":
            self._departed.setdefault(rank, event)
        elif kind == "end":
            return bool(rank == self._world.rank)
        elif kind == "roll_call":
            situation = self.record.situation(self._waiting, self._main_thread_id, event)
            roll_call.answer(store, event, self._world.rank, {"host": self.hostname, **situation})
        elif kind in {"verdict", "broken", "ended"}:
            gone = [] if event.get("have_left") else event.get("gone", [])
            self._take_loss(store, event, [rank] if kind == "ended" else gone)
        return False

    def _take_loss(self, store: Store, event: dict[str, Any], ranks: Sequence[int]) -> None:
        """Note that ranks are gone: everyone's error, unless they may go and not all that may go have failed."""
        others = self._expendable.difference(self._lost(), ranks)
        if ranks and others and self._expendable.issuperset(ranks):
            for rank in set(ranks) - {self._world.rank}:
                self._departed.setdefault(rank, event)
                self.stopping.lose(store, rank, self._next_event)
        elif self.error is None:
            self.error = blame.of_event(self._world, event)

    def _lost(self) -> list[int]:
        """Return the ranks that have failed, and that the job goes on without."""
        departed = list(self._departed.items())
        return [rank for rank, event in departed if rank in self._expendable and event["kind"] != "left"]

    def _error_of(self, rank: int) -> RankwiseError:
        return blame.of_event(self._world, self._departed[rank])

    # -- who is missing ----------------------------------------------------------------------------

    def _why_pointless(self, ticket: Ticket) -> RankwiseError | None:
        """Return what is to be raised where a wait cannot end, as far as that is known."""
        if self.error is not None:
            return self.error
        for rank, event in list(self._departed.items()):
            if rank == self._world.rank or not self.record.is_member(rank, ticket.channel):
                continue
            if _has_come(event.get("counts", ()), ticket):
                continue
            if event["kind"] == "left":
                self.error = blame.peer_left(self._world, ticket.words, ticket.number, event)
                return self.error
            # Of no collective it is not known whether this rank has to do with it.
            if rank in self._expendable and ticket.sequence:
                # Not of this rank's whole job: groups without that rank go on.
                return self._error_of(rank)
        return None

    def _roll_call(self, channel: int = 0, sequence: int = 0, *, without: Collection[int] = ()) -> blame.Answers:
        """Ask every rank what it is doing, and look at those of this host that do not answer."""
        world = self._world
        asked = {"channel": channel, "sequence": sequence, "stacks": "missing"}
        answers = roll_call.call(
            self._store,
            rank=world.rank,
            world_size=world.world_size,
            asked=asked,
            awaited=set(range(world.world_size)).difference(self._lost(), without),
            first=self._next_event,
        )
        silent_ranks = sorted(set(range(world.world_size)) - set(answers))
        seen = roll_call.look_at(self._store, silent_ranks)
        return {**answers, **{rank: {"host": self.hostname, **what} for rank, what in seen.items()}}

    def _is_of_all(self, channel: int) -> bool:
        """Return whether every rank comes to the collectives of a channel: others cannot be compared on all."""
        return all(self.record.is_member(rank, channel) for rank in range(self.world_size))

    def _members(self, ticket: Ticket) -> list[int]:
        """Return the ranks that take part in a collective."""
        return [rank for rank in range(self._world.world_size) if self.record.is_member(rank, ticket.channel)]

    def _claim(self, purpose: str) -> bool:
        """Return true on the one rank that speaks for all."""
        return self._store.add(f"rankwise/claims/{purpose}", 1) == 1

    def _say_who_is_missing(self, ticket: Ticket, waited: float) -> None:
        if not self._claim(f"notice/{ticket.channel}/{ticket.sequence}/{int(waited / NOTICE_SECONDS)}"):
            return
        found = blame.findings(self._roll_call(ticket.channel, ticket.sequence), ticket.sequence, self._members(ticket))
        warn(blame.notice(ticket.words, waited, found), all_ranks=True)

    def _post_verdict(self, ticket: Ticket, waited: float) -> None:
        """Let one waiting rank find out who is missing, for all; then wait for what it found."""
        world = self._world
        found: blame.Event = {"kind": "verdict", "rank": world.rank, "what": ticket.words, "waited": waited}
        if self._claim(f"verdict/{ticket.channel}/{ticket.sequence}"):
            answers = self._roll_call(ticket.channel, ticket.sequence)
            found |= blame.findings(answers, ticket.sequence, self._members(ticket))
            difference = blame.first_difference(answers)
            if difference is not None:
                answers = self._roll_call(ticket.channel, difference)
                entries = {rank: answer["entry"] for rank, answer in answers.items() if "entry" in answer}
                found["calls"] = blame.calls_of(entries, answers)
            post(self._store, found, self._next_event)
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None, VERDICT_SECONDS)
        raise self.error or blame.verdict(world, {"missing": [], "table": "", **found})

    def _tell_who_ended(self, ticket: Ticket, ended: PeerEnded) -> RankwiseError:
        """Say for all ranks which process is gone, unless it or its launcher has said why."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or ended.rank in self._departed, EXPLANATION_SECONDS)
            pointless = self._why_pointless(ticket)
            if pointless is not None:
                return pointless
            if ended.rank in self._lost():
                return self._error_of(ended.rank)
        if ended.rank in self._departed:
            event = blame.broken(
                self._world, ticket.words, gone=[ended.rank], table="", departed=self._departed, reason=str(ended)
            )
            return blame.connection_broke(self._world, event)
        event = {"kind": "ended", "rank": ended.rank, "what": ticket.words, "process": ended.process}
        with contextlib.suppress(StoreLost):
            post(self._store, event, self._next_event)
        return blame.peer_ended(self._world, event)

    def _explain(self, ticket: Ticket, error: RuntimeError) -> RankwiseError:
        """Find out which rank a broken connection stands for."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._why_pointless(ticket) or self._departed.keys() - self._lost(), EXPLANATION_SECONDS
            )
            pointless = self._why_pointless(ticket)
        if pointless is not None:
            return pointless
        with contextlib.suppress(StoreLost):
            lost, answers = self._lost(), self._roll_call()  # of those lost meanwhile nobody has heard here
            gone = blame.unheard(answers, sorted(set(range(self._world.world_size)).difference(lost)))
            table = blame.table(answers, self._world.world_size)
            event = blame.broken(
                self._world, ticket.words, gone=gone, table=table, departed=self._departed, reason=str(error)
            )
            # Others may wait for this rank only, and would name it instead.
            post(self._store, event, self._next_event)
            with self._changed:
                # It comes back to this rank too: as its error, or as ranks that it goes on without.
                self._changed.wait_for(
                    lambda: self.error is not None or (gone and not set(gone).difference(self._lost())),
                    EXPLANATION_SECONDS,
                )
                return self.error or blame.connection_broke(self._world, event)
        return self.error or blame.store_lost(self._world)


def _has_come(counts: Sequence[int], ticket: Ticket) -> bool:
    """Return whether a rank that left with these counts had come to a collective."""
    return ticket.channel < len(counts) and counts[ticket.channel] >= ticket.sequence
