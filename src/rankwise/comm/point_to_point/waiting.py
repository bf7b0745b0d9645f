# SPDX-License-Identifier: Apache-2.0
"""Waiting for one other rank: until its message is here, or it is clear that it will not arrive."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise import meter
from rankwise.errors import PeerMissing
from rankwise.health import call_site, diagnosis, process_probe, status_poll
from rankwise.health.collective_timeout import NOTICE_SECONDS, SLICE_SECONDS, CollectiveWait, PeerEnded
from rankwise.health.failure_detector import EXPLANATION_SECONDS
from rankwise.health.flight_recorder import Ticket
from rankwise.log import warn

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from rankwise.health.failure_detector import FailureDetector

LOOK_SECONDS = 1.0
"""How often the awaited rank is checked."""


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


def wait(peer_wait: PeerWait, changed: threading.Condition, is_there: Callable[[], bool]) -> None:
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
    ticket = Ticket(number=0, what=peer_wait.what, site=call_site.user_call_site())
    with CollectiveWait(peer_wait.detector, ticket):
        _wait(peer_wait, changed, is_there)


def _wait(peer_wait: PeerWait, changed: threading.Condition, is_there: Callable[[], bool]) -> None:
    begun = time.monotonic()
    notice, next_look = NOTICE_SECONDS, LOOK_SECONDS
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
        elif broken is not None or waited > next_look:
            next_look = waited + LOOK_SECONDS
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
    process = status_poll.process_of(peer_wait.detector.store, peer_wait.peer)
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
