# SPDX-License-Identifier: Apache-2.0
"""Waiting for a collective, or for one rank: until it is done, until it is known that it cannot be, or its timeout.

Callers wait in slices and call :meth:`CollectiveWait.check` between them. The failure detector has recorded what
other ranks did; here the waiting rank raises it, names the missing ranks or those that wait for each other, or
determines why a connection broke.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

from rankwise import meter
from rankwise.errors import PeerMissing, RankwiseError
from rankwise.health import diagnosis, process_probe
from rankwise.health.call_site import user_call_site
from rankwise.health.event_log import ProcessEnded, TimedOut, post
from rankwise.health.failure_detector import EXPLANATION_SECONDS
from rankwise.health.flight_recorder import Ticket
from rankwise.log import warn
from rankwise.meter import EXCHANGE, SCRIPT
from rankwise.store.client import StoreLost

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from types import TracebackType

    from rankwise.health.diagnosis import Answers
    from rankwise.health.failure_detector import FailureDetector

DEFAULT_TIMEOUT_SECONDS = 600.0
"""How long a collective may take, unless ``join(timeout_seconds=...)`` says otherwise."""
SLICE_SECONDS = 0.2
"""How long a rank waits for a collective before it checks again whether that can complete."""
FIRST_CHECK_SECONDS = 1.0
"""How long a wait lasts before it is compared with departures of other ranks."""
LONG_SECONDS = 2.0
"""After how long a wait is counted: once all ranks are in such a one, one of them asks whether any can end."""
NOTICE_SECONDS = 30.0
"""After how long a wait is logged, with the missing ranks."""
VERDICT_SECONDS = 10.0
"""How long a rank waits for another's verdict: two status polls, and a probe of ranks that do not answer."""
PEER_CHECK_SECONDS = 1.0
"""How often the awaited rank is checked."""

_LONG_WAITS = "rankwise/long_waits"
"""The key of the number of ranks whose wait is counted."""


class PeerEnded(RuntimeError):
    """The process of a rank that is waited for has exited. Raised within a :class:`CollectiveWait`."""

    def __init__(self, rank: int, process: int) -> None:
        super().__init__(f"process {process} of rank {rank} has exited")
        self.rank = rank
        self.process = process


class CollectiveWait:
    """One wait of this rank for a collective.

    Usage::

        with CollectiveWait(detector, ticket) as wait:
            while not is_done(SLICE_SECONDS):
                wait.check()

    An error of a broken connection inside the block is replaced by the error of the peer that caused it.

    Args:
        detector: of this rank.
        ticket: of the collective that is waited for.
        since: when the wait began, for one that is followed by :meth:`check` alone, without ``with``.

    Raises:
        PeerFailed, PeerMissing, CollectiveMismatch: with the rank; the same on every waiting rank.
    """

    __slots__ = ("_detector", "_is_counted", "_next_notice", "_part", "_start", "_ticket")

    def __init__(self, detector: FailureDetector, ticket: Ticket, *, since: float = 0.0) -> None:
        self._detector = detector
        self._ticket = ticket
        self._start = since
        self._part = SCRIPT
        self._next_notice = NOTICE_SECONDS
        self._is_counted = False

    @property
    def ticket(self) -> Ticket:
        """The collective that is waited for."""
        return self._ticket

    def __enter__(self) -> Self:
        self._detector.note_wait(self._ticket)
        self._part = meter.current.enter(EXCHANGE)
        self._start = time.monotonic()
        return self

    def check(self) -> None:
        """Raise if the wait cannot end or has timed out; log it if it is long."""
        detector, ticket = self._detector, self._ticket
        waited = time.monotonic() - self._start
        if waited > FIRST_CHECK_SECONDS or detector.error is not None:
            failure = detector.failure_blocking(ticket)
            if failure is not None:
                raise failure
        if waited > LONG_SECONDS and not self._is_counted and detector.is_in_main_thread():
            self._is_counted = True
            if detector.store.add(_LONG_WAITS, 1) >= detector.world_size:
                self._raise_deadlock(waited)
        if waited > detector.timeout_seconds:
            self._reach_verdict(waited)
        elif waited > self._next_notice:
            self._next_notice *= 2
            self._report_missing(waited)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_counted and not isinstance(error, StoreLost):
            with contextlib.suppress(StoreLost):
                self._detector.store.add(_LONG_WAITS, -1)
        try:
            if error is None:
                self._ticket.end()
                return
            self._detector.note_raised()
            if isinstance(error, RuntimeError | StoreLost) and not isinstance(error, RankwiseError):
                self._raise_reason(error)
        finally:
            meter.current.resume(self._part)
            self._detector.note_wait(None)

    def _raise_reason(self, error: Exception) -> None:
        """Raise the peer's error in place of the one it caused: torch's text would only distract from it."""
        detector = self._detector
        if isinstance(error, PeerEnded):
            raise self._report_ended(error) from None
        if isinstance(error, StoreLost):
            detector.store.close()  # reporting this rank's failure to it would take equally long
            raise detector.error or diagnosis.store_lost(detector.world) from None
        if not diagnosis.is_of_a_signal_handler(error):
            raise self._explain(error) from None

    # -- which ranks are missing ---------------------------------------------------------------------

    def _members(self) -> list[int]:
        detector = self._detector
        return [r for r in range(detector.world_size) if detector.recorder.is_member(r, self._ticket.exchange_id)]

    @property
    def _collective(self) -> str:
        return f"{self._detector.recorder.name_of(self._ticket.exchange_id)}/{self._ticket.sequence}"

    def _claim(self, purpose: str) -> bool:
        """Return true on the one rank that reports for all."""
        return self._detector.store.add(f"rankwise/claims/{purpose}", 1) == 1

    def _report_missing(self, waited: float) -> None:
        ticket = self._ticket
        if not self._claim(f"notice/{self._collective}/{int(waited / NOTICE_SECONDS)}"):
            return
        answers = self._detector.poll_status(ticket.exchange_id, ticket.sequence)
        told = diagnosis.notice(diagnosis.of_answers(ticket.words, waited, answers, ticket.sequence, self._members()))
        warn(told, all_ranks=True)
        meter.current.note_event(told)

    def _raise_deadlock(self, waited: float) -> None:
        """Raise on all ranks if some of them wait for each other."""
        detector = self._detector
        answers = detector.poll_status()
        stuck = deadlocked(answers)
        if stuck:
            calls = {rank: [answers[rank]["what"], answers[rank]["at"]] for rank in stuck}
            found = TimedOut(self._ticket.words, waited, calls=diagnosis.calls_of(calls, answers))
            post(detector.store, found, detector.next_event)
            self._raise_verdict(found)

    def _reach_verdict(self, waited: float) -> None:
        """Have one waiting rank determine the missing ranks for all; then raise its verdict."""
        detector, ticket = self._detector, self._ticket
        found = TimedOut(ticket.words, waited)
        if self._claim(f"verdict/{self._collective}"):
            answers = detector.poll_status(ticket.exchange_id, ticket.sequence)
            found = diagnosis.of_answers(ticket.words, waited, answers, ticket.sequence, self._members())
            difference = diagnosis.first_difference(answers)
            if difference is not None:
                answers = detector.poll_status(ticket.exchange_id, difference)
                entries = {rank: answer["entry"] for rank, answer in answers.items() if "entry" in answer}
                found = replace(found, calls=diagnosis.calls_of(entries, answers))
            post(detector.store, found, detector.next_event)
        self._raise_verdict(found)

    def _raise_verdict(self, found: TimedOut) -> NoReturn:
        """Raise the verdict that a rank has posted; ``found`` is what this one knows."""
        detector = self._detector
        with detector.changed:
            detector.changed.wait_for(lambda: detector.error is not None, VERDICT_SECONDS)
        raise detector.error or diagnosis.timed_out(detector.world, found)

    # -- what broke --------------------------------------------------------------------------------

    def _report_ended(self, ended: PeerEnded) -> RankwiseError:
        """Report to all ranks which process has ended, unless it or its launcher has reported why; return the error."""
        detector, ticket, rank = self._detector, self._ticket, ended.rank
        with detector.changed:
            detector.changed.wait_for(
                lambda: detector.error is not None or detector.departed(rank), EXPLANATION_SECONDS
            )
            failure = detector.failure_blocking(ticket)
            if failure is not None:
                return failure
            loss = detector.loss_of(rank)
            if loss is not None:
                return loss
        if detector.departed(rank):
            broke = diagnosis.broken(
                ticket.words, gone=[rank], table="", departed=detector.departures, reason=str(ended)
            )
            return diagnosis.connection_broke(detector.world, broke)
        event = ProcessEnded(rank, ticket.words, ended.process)
        with contextlib.suppress(StoreLost):
            post(detector.store, event, detector.next_event)
        return diagnosis.peer_ended(detector.world, event)

    def _explain(self, error: Exception) -> RankwiseError:
        """Determine which rank caused a broken connection."""
        detector, ticket = self._detector, self._ticket
        with detector.changed:
            detector.changed.wait_for(
                lambda: detector.failure_blocking(ticket) or detector.departures.keys() - detector.lost_ranks(),
                EXPLANATION_SECONDS,
            )
            failure = detector.failure_blocking(ticket)
        if failure is not None:
            return failure
        with contextlib.suppress(StoreLost):
            # In this order: a rank that is lost in the meantime has not answered.
            lost = detector.lost_ranks()
            answers = detector.poll_status()
            silent = diagnosis.unanswered(answers, sorted(set(range(detector.world_size)).difference(lost)))
            event = diagnosis.broken(
                ticket.words,
                gone=silent,
                table=diagnosis.table(answers, detector.world_size),
                departed=detector.departures,
                reason=str(error),
            )
            # Others may be waiting only for this rank, and would name it instead.
            post(detector.store, event, detector.next_event)
            with detector.changed:
                # This rank receives it too: as its error, or as ranks that the job continues without.
                detector.changed.wait_for(
                    lambda: detector.error is not None or (silent and not set(silent) - set(detector.lost_ranks())),
                    EXPLANATION_SECONDS,
                )
                return detector.error or diagnosis.connection_broke(detector.world, event)
        return detector.error or diagnosis.store_lost(detector.world)


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


# -- one rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PeerWait:
    """What is waited for, from which rank, and how to detect that it will never arrive."""

    what: str
    peer: int
    detector: FailureDetector
    broken: Callable[[], str | None]
    """Returns why nothing more can arrive, if that is known."""
    spare_seconds: float = 0.0
    """How much longer than the world's timeout to wait."""
    do: str = (
        "make sure that rank calls send() or backward() too, in the same order; if two ranks both wait in recv(), have "
        "one of them send first. If the wait is intended, raise join(timeout_seconds=...)"
    )
    """The fix to suggest after the timeout."""
    do_when_left: str = (
        "pair every recv(source=...) with one send(to=...) on that rank, in the same order, "
        "and every backward() of a sent value with one of the received value"
    )
    """The fix to suggest if the peer has left."""


def wait_for_peer(peer_wait: PeerWait, changed: threading.Condition, is_there: Callable[[], bool]) -> None:
    """Return when ``is_there`` returns true.

    ``changed`` is notified whenever that may change, and held while ``is_there`` is called.

    Raises:
        PeerFailed: a rank failed.
        PeerMissing: the awaited rank has left or died, or did not arrive within the world's timeout.
    """
    with changed:
        if is_there():
            return
    # Not a collective: it is counted on this rank only, so it has no number.
    ticket = Ticket(number=0, what=peer_wait.what, site=user_call_site())
    with CollectiveWait(peer_wait.detector, ticket):
        _wait_for_peer(peer_wait, changed, is_there)


def _wait_for_peer(peer_wait: PeerWait, changed: threading.Condition, is_there: Callable[[], bool]) -> None:
    begun = time.monotonic()
    notice, next_check = NOTICE_SECONDS, PEER_CHECK_SECONDS
    reason: Exception | None = None
    explained_by = 0.0
    while True:
        with changed:
            if changed.wait_for(is_there, SLICE_SECONDS):
                return
            broken = peer_wait.broken()
        if peer_wait.detector.error is not None:
            raise peer_wait.detector.error
        waited = time.monotonic() - begun
        if reason is not None:
            if waited > explained_by:
                # A rank that failed, and that the job can lose, may have reported it meanwhile.
                raise peer_wait.detector.loss_of(peer_wait.peer) or reason
        elif broken is not None or waited > next_check:
            next_check = waited + PEER_CHECK_SECONDS
            reason = _why_never(peer_wait, broken)
            # A rank that ends may have sent something before, or may report why in a moment.
            explained_by = waited + EXPLANATION_SECONDS
        if waited > peer_wait.detector.timeout_seconds + peer_wait.spare_seconds:
            error = _timed_out(peer_wait, waited)
            # Another rank may have timed out first, and known more.
            raise peer_wait.detector.error or error
        if waited > notice:
            notice *= 2
            words = f"{peer_wait.what} has been waiting {waited:.0f} s for rank {peer_wait.peer}:"
            told = f"{words}\n{_doing(peer_wait)}"
            warn(told, all_ranks=True)
            meter.current.note_event(told)


def _why_never(peer_wait: PeerWait, broken: str | None) -> Exception | None:
    """Return the error to raise if the peer can send nothing more."""
    loss = peer_wait.detector.loss_of(peer_wait.peer)
    if loss is not None:
        return loss
    process = process_probe.process_of(peer_wait.detector.store, peer_wait.peer)
    if process is None:
        return PeerMissing(
            f"{peer_wait.what} cannot complete: rank {peer_wait.peer} has left.",
            ranks=[peer_wait.peer],
            where=str(peer_wait.detector.world),
            evidence=broken,
            do=peer_wait.do_when_left,
        )
    if process.host and process.host == process_probe.this_process().host and process_probe.has_exited(process.pid):
        return PeerEnded(peer_wait.peer, process.pid)
    return None if broken is None else RuntimeError(broken)


def _timed_out(peer_wait: PeerWait, waited: float) -> PeerMissing:
    return PeerMissing(
        f"{peer_wait.what} timed out after {waited:.1f} s waiting for rank {peer_wait.peer}.",
        ranks=[peer_wait.peer],
        where=str(peer_wait.detector.world),
        evidence=_doing(peer_wait),
        do=peer_wait.do,
    )


def _doing(peer_wait: PeerWait) -> str:
    """Return what every rank is doing, and the stack of the awaited one."""
    answers = peer_wait.detector.poll_status(stacks="all")
    table = diagnosis.table(answers, peer_wait.detector.world_size)
    return f"{table}\n{diagnosis.stacks(answers, [peer_wait.peer])}".strip()
