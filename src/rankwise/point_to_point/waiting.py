# SPDX-License-Identifier: Apache-2.0
"""Waiting for one other rank: until what it owes is here, or it is clear that it will not come."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise import blame, places, roll_call, silent
from rankwise.errors import PeerMissing
from rankwise.exchange.peers import Peers
from rankwise.log import warn
from rankwise.record import Ticket
from rankwise.watch import EXPLANATION_SECONDS, NOTICE_SECONDS, SLICE_SECONDS, PeerEnded

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from rankwise.silent import Process
    from rankwise.store import Store
    from rankwise.watch import Watch
    from rankwise.world import World

LOOK_SECONDS = 1.0
"""How often a rank that is waited for is looked at."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """What is waited for, from whom, and how it can be seen that it is in vain."""

    what: str
    peer: int
    world: World
    watch: Watch
    store: Store
    broken: Callable[[], str | None]
    """Why nothing can come any more, where that is known."""
    spare_seconds: float = 0.0
    """How much longer than the world's limit to wait."""
    do: str = (
        "let that rank send or run backward() too, in the same order; two ranks that both wait in recv() wait for "
        "each other: have one send first. Where the wait is meant, join(timeout_seconds=...) is the limit"
    )
    """What to do where the limit passes."""
    do_when_left: str = (
        "let every recv(source=...) have one send(to=...) on that rank, in the same order, "
        "and every backward() of what was sent one of what was received"
    )
    """What to do where the peer has left."""


def wait(patience: Patience, changed: threading.Condition, is_there: Callable[[], bool]) -> None:
    """Return when ``is_there`` says so.

    Args:
        patience: what is waited for.
        changed: told whenever ``is_there`` may say something else, and held when it is asked.
        is_there: whether it has come.

    Raises:
        PeerFailed: a rank failed.
        PeerMissing: the rank that is waited for has left or died, or did not come within the world's limit.
    """
    with changed:
        if is_there():
            return
    # No collective: it is counted on this rank only, so that it has no number.
    ticket = Ticket(number=0, what=patience.what, place=places.user_place())
    patience.watch.wait(ticket, lambda _: _wait(patience, changed, is_there))


def _wait(patience: Patience, changed: threading.Condition, is_there: Callable[[], bool]) -> bool:
    begun = time.monotonic()
    notice, next_look = NOTICE_SECONDS, LOOK_SECONDS
    reason: Exception | None = None
    explained_by = 0.0
    while True:
        with changed:
            if changed.wait_for(is_there, SLICE_SECONDS):
                return True
            broken = patience.broken()
        if patience.watch.error is not None:
            raise patience.watch.error
        waited = time.monotonic() - begun
        if reason is not None:
            if waited > explained_by:
                # Whoever failed and is gone on without may have said so meanwhile.
                raise patience.watch.loss_of(patience.peer) or reason
        elif broken is not None or waited > next_look:
            next_look = waited + LOOK_SECONDS
            reason = _why_in_vain(patience, broken)
            # Whoever ends may have sent something before, or say why in a moment.
            explained_by = waited + EXPLANATION_SECONDS
        if waited > patience.watch.timeout_seconds + patience.spare_seconds:
            error = _in_vain(patience, waited)
            # Another rank's limit may have passed first, and it knew more.
            raise patience.watch.error or error
        if waited > notice:
            notice *= 2
            words = f"{patience.what} has been waiting for {waited:.0f} s, for rank {patience.peer}:"
            warn(f"{words}\n{_doing(patience)}", all_ranks=True)


def _why_in_vain(patience: Patience, broken: str | None) -> Exception | None:
    """Return what is to be raised where the peer can send nothing any more."""
    loss = patience.watch.loss_of(patience.peer)
    if loss is not None:
        return loss
    process = roll_call.process_of(patience.store, patience.peer)
    if process is None:
        return PeerMissing(
            f"{patience.what} cannot complete: rank {patience.peer} has left.",
            ranks=[patience.peer],
            where=str(patience.world),
            evidence=broken,
            do=patience.do_when_left,
        )
    if process.host and process.host == silent.this_process().host and _has_ended(process):
        return PeerEnded(patience.peer, process.pid)
    return None if broken is None else RuntimeError(broken)


def _has_ended(process: Process) -> bool:
    peers = Peers([0], [process.pid])
    try:
        return peers.has_ended(0)
    finally:
        peers.close()


def _in_vain(patience: Patience, waited: float) -> PeerMissing:
    return PeerMissing(
        f"{patience.what} waited {waited:.1f} s in vain. Missing: rank {patience.peer}.",
        ranks=[patience.peer],
        where=str(patience.world),
        evidence=_doing(patience),
        do=patience.do,
    )


def _doing(patience: Patience) -> str:
    """Return what every rank is doing, and the stack of the one that is waited for."""
    world = patience.world
    answers = roll_call.call(
        patience.store,
        rank=world.rank,
        world_size=world.world_size,
        asked={"channel": 0, "sequence": 0, "stacks": "all"},
    )
    silent_ranks = sorted(set(range(world.world_size)) - set(answers))
    seen = roll_call.look_at(patience.store, silent_ranks)
    answers |= {rank: {"host": world.hostname, **what} for rank, what in seen.items()}
    table = blame.table(answers, world.world_size)
    return f"{table}\n{blame.stacks(answers, [patience.peer])}".strip()
