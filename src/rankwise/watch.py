# SPDX-License-Identifier: Apache-2.0
"""A thread per rank that follows the job's event log, so that nothing hangs in silence.

Ranks write events to the store: a failure, a departure, a roll call, a verdict on who is missing. The thread
reads them in order; whoever waits for a collective looks here. Never touches the process group.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise import blame
from rankwise.errors import RankwiseError, fold_ranks
from rankwise.events import key_of, post, post_departure, post_failure
from rankwise.log import warn
from rankwise.store import StoreLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.store import Store
    from rankwise.world import World

SLICE_SECONDS = 0.2
"""How long a rank waits for a collective before it looks at the log again."""
ROLL_CALL_SECONDS = 2.0
"""How long ranks have to answer a roll call."""
EXPLANATION_SECONDS = 1.0
"""How long a rank with a broken connection waits for the reason before it asks."""
NOTICE_SECONDS = 30.0
"""After how long a wait is mentioned, with who is missing."""
NO_LIMIT_SECONDS = 10.0**8


class PeerEnded(RuntimeError):
    """The process of a rank that is waited for has ended."""

    def __init__(self, rank: int, process: int) -> None:
        super().__init__(f"process {process} of rank {rank} has ended")
        self.rank = rank
        self.process = process


@dataclass(slots=True)
class Ticket:
    """One collective this rank takes part in: its number, the same on every rank, and its words."""

    number: int
    what: str
    since: float = field(default_factory=time.monotonic)


class Watch:
    """Follows the event log for one rank, from join to leave."""

    def __init__(self, store: Store, world: World, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.error: RankwiseError | None = None
        self._world = world
        self._store = store.clone()
        self._departed: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._waiting: Ticket | None = None
        self._last = 0
        self._next_event = 1
        self._main_thread_id = threading.get_ident()
        self._thread = threading.Thread(target=self._follow, args=(store.clone(),), name="rankwise-watch", daemon=True)
        self._thread.start()

    def ticket(self, what: str) -> Ticket:
        """Count one more collective and return its ticket. Every rank counts the same ones."""
        if self.error is not None:
            raise self.error
        self._last += 1
        return Ticket(self._last, what)

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
                    self._raise_if_pointless(ticket)
                if waited > self.timeout_seconds:
                    self._post_verdict(ticket, waited)
                elif waited > notice:
                    notice *= 2
                    self._say_who_is_missing(ticket, waited)
        except PeerEnded as ended:
            raise self._tell_who_ended(ticket, ended) from None
        except RuntimeError as error:
            if isinstance(error, RankwiseError):
                raise
            reason = self._explain(ticket, error)
            # What a peer did explains the broken connection; torch's words on it would only stand in the way.
            raise reason from None
        finally:
            self._waiting = None

    def leave(self, *, wait_for_peers: bool) -> None:
        """Say that this rank is done, and stop the thread.

        Args:
            wait_for_peers: stay until every other rank has left or failed too: the rank that serves the
                store must be the last to go.
        """
        with contextlib.suppress(StoreLost):
            post_departure(self._store, rank=self._world.rank, last=self._last)
            limit = self.timeout_seconds if self.error is None else ROLL_CALL_SECONDS
            self._end(limit if wait_for_peers else 0.0)

    def fail(self, error_type: str, text: str, *, wait_for_peers: bool) -> None:
        """Tell every rank that this one failed, and stop the thread; else as :meth:`leave`."""
        with contextlib.suppress(StoreLost):
            post_failure(
                self._store,
                rank=self._world.rank,
                error_type=error_type,
                text=text,
                hostname=self._world.hostname,
            )
            self._end(ROLL_CALL_SECONDS if wait_for_peers else 0.0)

    def _end(self, limit_seconds: float) -> None:
        """Wait for the others to go, then have the thread read its own end."""
        if limit_seconds:
            with self._changed:
                self._changed.wait_for(lambda: self._gone() >= self._world.world_size - 1, limit_seconds)
        post(self._store, {"kind": "end", "rank": self._world.rank}, self._next_event)
        # A thread inside torch while the interpreter ends would abort the process.
        self._thread.join(ROLL_CALL_SECONDS)

    def _gone(self) -> int:
        return len(self._departed.keys() - {self._world.rank})

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
        if kind == "failed":
            self._departed.setdefault(rank, event)
            if rank != self._world.rank and self.error is None:
                self.error = blame.peer_failed(self._world, event)
        elif kind == "left":
            self._departed.setdefault(rank, event)
        elif kind == "end":
            return bool(rank == self._world.rank)
        elif kind == "roll_call":
            answer = json.dumps(self._situation())
            store.set(f"rankwise/roll_calls/{event['call']}/{self._world.rank}", answer)
        elif kind == "verdict" and self.error is None:
            self.error = blame.verdict(self._world, event)
        elif kind == "broken" and self.error is None:
            self.error = blame.connection_broke(self._world, event)
        elif kind == "ended" and self.error is None:
            self.error = blame.peer_ended(self._world, event)
        return False

    def _situation(self) -> dict[str, Any]:
        ticket = self._waiting
        if ticket is not None:
            seconds = time.monotonic() - ticket.since
            return {"number": ticket.number, "what": ticket.what, "seconds": seconds}
        return {"number": None, "last": self._last, "at": _user_line(self._main_thread_id)}

    # -- who is missing ----------------------------------------------------------------------------

    def _raise_if_pointless(self, ticket: Ticket) -> None:
        if self.error is not None:
            raise self.error
        for rank, event in list(self._departed.items()):
            last = event.get("last")
            if rank == self._world.rank or (last is not None and last >= ticket.number):
                continue
            if event["kind"] == "left":
                self.error = blame.peer_left(self._world, ticket.what, ticket.number, event)
                raise self.error

    def _roll_call(self) -> dict[int, dict[str, Any]]:
        """Ask every rank what it is doing; ranks that do not answer are absent from the result."""
        call = self._store.add("rankwise/roll_calls", 1)
        post(self._store, {"kind": "roll_call", "rank": self._world.rank, "call": call}, self._next_event)
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        answers: dict[int, dict[str, Any]] = {}
        pending = set(range(self._world.world_size))
        while pending and time.monotonic() < deadline:
            for rank in sorted(pending):
                key = f"rankwise/roll_calls/{call}/{rank}"
                if self._store.check(key):
                    answers[rank] = json.loads(self._store.get(key, ROLL_CALL_SECONDS))
                    pending.discard(rank)
            # The store's own wait would print a line to stderr for each rank that does not answer.
            time.sleep(0.01)
        return answers

    def _claim(self, purpose: str) -> bool:
        """Return true on the one rank that speaks for all."""
        return self._store.add(f"rankwise/claims/{purpose}", 1) == 1

    def _say_who_is_missing(self, ticket: Ticket, waited: float) -> None:
        if not self._claim(f"notice/{ticket.number}/{int(waited / NOTICE_SECONDS)}"):
            return
        world_size = self._world.world_size
        answers = self._roll_call()
        missing = blame.missing_ranks(answers, ticket.number, world_size)
        who = fold_ranks(missing) if missing else "the network"
        warn(
            f"{ticket.what} has been waiting for {waited:.0f} s, for {who}:\n" + blame.situations(answers, world_size),
            all_ranks=True,
        )

    def _post_verdict(self, ticket: Ticket, waited: float) -> None:
        """Let one waiting rank find out who is missing, for all; then wait for what it found."""
        found: blame.Event = {
            "kind": "verdict",
            "rank": self._world.rank,
            "what": ticket.what,
            "waited": waited,
            "missing": [],
            "mismatch": False,
            "table": "",
        }
        if self._claim(f"verdict/{ticket.number}"):
            world_size = self._world.world_size
            answers = self._roll_call()
            words = {a["what"] for a in answers.values() if a["number"] == ticket.number}
            found["missing"] = blame.missing_ranks(answers, ticket.number, world_size)
            found["mismatch"] = len(words) > 1
            found["table"] = blame.situations(answers, world_size)
            post(self._store, found, self._next_event)
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None, 2 * ROLL_CALL_SECONDS)
        raise self.error or blame.verdict(self._world, found)

    def _tell_who_ended(self, ticket: Ticket, ended: PeerEnded) -> RankwiseError:
        """Say for all ranks which process is gone, unless it or its launcher has said why."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or ended.rank in self._departed, EXPLANATION_SECONDS)
        with contextlib.suppress(RankwiseError):
            self._raise_if_pointless(ticket)
        if self.error is not None:
            return self.error
        if ended.rank in self._departed:
            event = blame.broken(
                self._world, ticket.what, gone=[ended.rank], table="", departed=self._departed, reason=str(ended)
            )
            return blame.connection_broke(self._world, event)
        event = {"kind": "ended", "rank": ended.rank, "what": ticket.what, "process": ended.process}
        with contextlib.suppress(StoreLost):
            post(self._store, event, self._next_event)
        return blame.peer_ended(self._world, event)

    def _explain(self, ticket: Ticket, error: RuntimeError) -> RankwiseError:
        """Find out which rank a broken connection stands for."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or self._departed, EXPLANATION_SECONDS)
        with contextlib.suppress(RankwiseError):
            self._raise_if_pointless(ticket)
        with contextlib.suppress(StoreLost):
            if self.error is None:
                answers = self._roll_call()
                gone = sorted(set(range(self._world.world_size)) - set(answers))
                table = blame.situations(answers, self._world.world_size)
                event = blame.broken(
                    self._world, ticket.what, gone=gone, table=table, departed=self._departed, reason=str(error)
                )
                # Others may wait for this rank only, and would name it instead.
                post(self._store, event, self._next_event)
                self.error = blame.connection_broke(self._world, event)
        return self.error or blame.store_lost(self._world)


def _user_line(thread_id: int) -> str:
    """Return where a thread is, as ``train.py:33 in load``: the innermost line of the user's own."""
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - the only way to see another thread
    own = str(Path(__file__).parent)
    innermost = None
    while frame is not None:
        name = frame.f_code.co_filename
        place = f"{Path(name).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        innermost = innermost or place
        if not name.startswith(("<", own, sys.prefix, sys.base_prefix)):
            return place
        frame = frame.f_back
    return innermost or "nothing any more"
