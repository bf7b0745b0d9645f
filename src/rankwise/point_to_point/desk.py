# SPDX-License-Identifier: Apache-2.0
"""This rank's end of all ways to other ranks: opened with the first message, closed when the world is left.

Every rank serves a socket of its own, found through the job's store, and lets in only who holds a secret that it
found there. Sending waits for nobody: torch's own ways (an NCCL communicator, a Gloo group of two) open
only when both sides come, so that a ring of ranks that all send first would never begin.
"""

from __future__ import annotations

import json
import secrets
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwise import rendezvous
from rankwise.errors import ConfigurationError, NotJoined, PeerFailed, PeerMissing, fold_ranks
from rankwise.log import warn
from rankwise.point_to_point.inbox import Inbox
from rankwise.point_to_point.outbox import KEYS, PURPOSE, Outbox, address_key
from rankwise.point_to_point.waiting import Patience, wait
from rankwise.session import current
from rankwise.store.server import AuthenticatedServer
from rankwise.store.wire import listen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.session import Session
    from rankwise.store import Store
    from rankwise.watch import Watch
    from rankwise.world import World


class Desk:
    """Sends to, and takes from, every other rank of one session."""

    def __init__(self, session: Session, store: Store, watch: Watch) -> None:
        """Begin to listen, and tell the others where."""
        self.session = weakref.ref(session)
        self.world = session.world
        self.inbox = Inbox()
        self.is_closed = False
        self._store = store.clone()
        self._watch = watch
        self._outboxes: dict[int, Outbox] = {}
        self._num_sent: dict[int, int] = {}
        self._store.set_if_absent(f"{KEYS}/secret", secrets.token_hex(32))
        self._secret = self._store.get(f"{KEYS}/secret", watch.timeout_seconds)
        host = rendezvous.address_on_job(self._store, session.world)
        server = AuthenticatedServer(listen(host, 0), self._secret, {PURPOSE: self.inbox.serve})
        server.start()
        self._server = server
        told = session.world.hostname if host == rendezvous.EVERY_INTERFACE else host
        self._store.set(address_key(session.world.rank), json.dumps([told, server.port]))
        # After a failure nobody calls leave(); the threads must not outlive this object. At the end of the process
        # leave() comes, later than this would, and still has to wait for what is under way.
        weakref.finalize(self, _abandon, self._outboxes, server).atexit = False
        session.on_leave(self.leave)

    def next_number(self, to: int) -> int:
        """Return the number of the next value that goes to ``to``."""
        self._num_sent[to] = number = self._num_sent.get(to, 0) + 1
        return number

    def send(self, to: int, head: dict[str, Any], buffers: Sequence[memoryview]) -> None:
        """Have a message sent to ``to``, and return at once.

        Raises:
            NotJoined: the world has been left.
            PeerFailed, PeerMissing: that rank is known to have failed or left.
        """
        if self.is_closed:
            raise NotJoined(
                "A message cannot be sent any more: the world it belongs to has been left.",
                do="run backward() inside the world that the tensors were received in",
            )
        if self._watch.error is not None:
            raise self._watch.error
        outbox = self.open_way(to)
        if outbox.error is not None:
            self.wait(f"send(to={to})", to, lambda: False)
        outbox.put(head, buffers)

    def tell(self, to: int, head: dict[str, Any]) -> None:
        """Send a head alone, where the way is open and ``to`` still there. For a garbage collection: takes no lock."""
        outbox = self._outboxes.get(to)
        if outbox is not None and not self.is_closed:
            outbox.put(head, ())

    def open_way(self, to: int) -> Outbox:
        """Begin to connect to ``to``, unless that was done before."""
        outbox = self._outboxes.get(to)
        if outbox is None:
            outbox = self._outboxes[to] = Outbox(
                rank=self.world.rank,
                to=to,
                store=self._store.clone(),
                secret=self._secret,
                timeout_seconds=self._watch.timeout_seconds,
                changed=self.inbox.changed,
            )
        return outbox

    def wait(self, what: str, peer: int, is_there: Callable[[], bool]) -> None:
        """Return when ``is_there`` says so, unless ``peer`` fails, leaves or stays away.

        Args:
            what: is waited for, in words.
            peer: the rank it depends on.
            is_there: looks at the inbox, which is held meanwhile.
        """
        outbox = self._outboxes.get(peer)
        patience = Patience(
            what=what,
            peer=peer,
            world=self.world,
            watch=self._watch,
            store=self._store,
            broken=lambda: self.inbox.ended.get(peer) or (None if outbox is None else outbox.error),
        )
        wait(patience, self.inbox.changed, is_there)

    def leave(self) -> None:
        """Wait until everything has come to where it was sent, then close.

        Raises:
            PeerMissing: a rank left without what was sent to it.
        """
        for outbox in self._outboxes.values():
            outbox.end()
        for to, outbox in self._outboxes.items():
            try:
                self.wait(f"delivery of what was sent to rank {to}", to, partial(_is_over, outbox))
            except (PeerFailed, PeerMissing) as error:
                # Gradients that nobody has waited for are no loss, nor is a rank that is gone on without.
                if outbox.num_lost() or (isinstance(error, PeerFailed) and self._watch.error is not None):
                    raise
            if outbox.num_lost():
                count = outbox.num_lost()
                raise PeerMissing(
                    f"Rank {to} has left, and {count} {'value' if count == 1 else 'values'} sent to it had not come.",
                    ranks=[to],
                    where=str(self.world),
                    evidence=outbox.error,
                    do=f"let rank {to} call recv(source={self.world.rank}) once for every send(to={to})",
                )
        self.is_closed = True
        ignored = {source: len(messages) for source, messages in self.inbox.values.items() if messages}
        if ignored:
            count, who = sum(ignored.values()), fold_ranks(list(ignored))
            warn(f"never received on this rank: {count} of the values sent to it, by {who}", all_ranks=True)
        if untaken := +self.inbox.count_untaken():
            warn(
                f"gradients came back for {untaken.total()} of the values that this rank sent, from "
                f"{fold_ranks(list(untaken))}, and no backward() took them: call send(...).backward()",
                all_ranks=True,
            )
        _abandon(self._outboxes, self._server)
        self._store.close()


_latest: list[weakref.ref[Desk]] = []


def desk(caller: str) -> Desk:
    """Return this session's desk, opening it when it is asked for first.

    Raises:
        NotJoined: no world has been joined.
        ConfigurationError: there is nobody else in it.
    """
    session = current()
    opened = _latest[0]() if _latest else None
    if opened is not None and opened.session() is session:
        return opened
    refuse_alone(caller, session.world)
    if session.store is None or session.watch is None:
        raise TypeError(f"a world of {session.world.world_size} ranks has no store")
    opened = Desk(session, session.store, session.watch)
    _latest[:] = [weakref.ref(opened)]
    return opened


def refuse_alone(caller: str, world: World) -> None:
    """Raise unless there is another rank.

    Raises:
        ConfigurationError: there is none.
    """
    if world.world_size == 1:
        raise ConfigurationError(
            f"{caller} needs another rank, and this is a world of one.",
            where=str(world),
            do="start at least two ranks (rankwise run -n 2 ...); "
            "on one rank call the second part of the model with what the first part returns",
        )


def _is_over(outbox: Outbox) -> bool:
    return outbox.is_over


def _abandon(outboxes: dict[int, Outbox], server: AuthenticatedServer) -> None:
    for outbox in outboxes.values():
        outbox.give_up()
    server.close()
