# SPDX-License-Identifier: Apache-2.0
"""This rank's end of all connections to other ranks: opened with the first message, closed on leaving the world.

Every rank serves its own socket, published in the job's store, and accepts only peers that hold a secret from
there. Sending does not wait for the peer: torch's own channels (an NCCL communicator, a Gloo group of two) open
only when both sides arrive, so a ring of ranks that all send first would never start.
"""

from __future__ import annotations

import json
import secrets
import weakref
from typing import TYPE_CHECKING, Any

from rankwise.comm.point_to_point.queues import KEYS, PURPOSE, RecvQueue, SendQueue, address_key
from rankwise.comm.point_to_point.waiting import PeerWait, wait
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, NotJoined, PeerFailed, PeerMissing, fold_ranks
from rankwise.log import warn
from rankwise.store import bootstrap
from rankwise.store.server import AuthenticatedServer
from rankwise.store.wire import listen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.comm.session import Session
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.store.values import Store
    from rankwise.world.facts import World


class Endpoint:
    """Sends to and receives from every other rank of one session."""

    def __init__(self, session: Session, store: Store, detector: FailureDetector) -> None:
        """Start listening, and publish the address."""
        self.world = session.world
        self.recv_queue = RecvQueue()
        self.is_closed = False
        self._store = store.clone()
        self.detector = detector
        self._send_queues: dict[int, SendQueue] = {}
        self._num_sent: dict[int, int] = {}
        self._store.set_if_absent(f"{KEYS}/secret", secrets.token_hex(32))
        self._secret = self._store.get(f"{KEYS}/secret", detector.timeout_seconds)
        host = bootstrap.address_on_job(self._store, session.world)
        server = AuthenticatedServer(listen(host, 0), self._secret, {}, {PURPOSE: self.recv_queue.serve})
        server.start()
        self._server = server
        announced = session.world.hostname if host == bootstrap.EVERY_INTERFACE else host
        self._store.set(address_key(session.world.rank), json.dumps([announced, server.port]))
        # After a failure leave() is not called; the threads must not outlive this object. At process exit leave()
        # runs later than this would, and must still wait for pending messages.
        weakref.finalize(self, _abandon, self._send_queues, server).atexit = False
        session.on_leave(self.leave)

    def next_number(self, to: int) -> int:
        """Return the number of the next value sent to ``to``."""
        self._num_sent[to] = number = self._num_sent.get(to, 0) + 1
        return number

    def send(self, to: int, head: dict[str, Any], buffers: Sequence[memoryview]) -> None:
        """Queue a message to ``to``, and return at once.

        Raises:
            NotJoined: the world has been left.
            PeerFailed, PeerMissing: that rank is known to have failed or left.
        """
        if self.is_closed:
            raise NotJoined(
                "A message can no longer be sent: its world has been left.",
                do="run backward() before leaving the world in which the tensors were received",
            )
        if self.detector.error is not None:
            raise self.detector.error
        send_queue = self.open_way(to)
        if send_queue.error is not None:
            self.wait(f"send(to={to})", to, lambda: False)
        send_queue.put(head, buffers)

    def send_head(self, to: int, head: dict[str, Any]) -> None:
        """Send only a head, if the connection is open and ``to`` still there. For garbage collection: takes no lock."""
        send_queue = self._send_queues.get(to)
        if send_queue is not None and not self.is_closed:
            send_queue.put(head, ())

    def open_way(self, to: int) -> SendQueue:
        """Start connecting to ``to``, unless that was done before."""
        send_queue = self._send_queues.get(to)
        if send_queue is None:
            send_queue = self._send_queues[to] = SendQueue(
                rank=self.world.rank,
                to=to,
                store=self._store.clone(),
                secret=self._secret,
                timeout_seconds=self.detector.timeout_seconds,
                changed=self.recv_queue.changed,
            )
        return send_queue

    def wait(self, what: str, peer: int, is_there: Callable[[], bool]) -> None:
        """Return when ``is_there`` returns true, unless ``peer`` fails, leaves or never arrives.

        ``what`` describes what is waited for. ``is_there`` checks the receive queue, which is locked meanwhile.
        """
        send_queue = self._send_queues.get(peer)
        peer_wait = PeerWait(
            what=what,
            peer=peer,
            detector=self.detector,
            broken=lambda: self.recv_queue.ended.get(peer) or (None if send_queue is None else send_queue.error),
        )
        wait(peer_wait, self.recv_queue.changed, is_there)

    def leave(self) -> None:
        """Wait until every message has arrived, then close.

        Raises:
            PeerMissing: a rank left before it received everything sent to it.
        """
        for send_queue in self._send_queues.values():
            send_queue.end()
        for to, send_queue in self._send_queues.items():
            try:
                self.wait(f"delivery of the values sent to rank {to}", to, lambda queue=send_queue: queue.is_over)
            except (PeerFailed, PeerMissing) as error:
                # Gradients that no backward() waited for are not a loss, nor is a rank the job can lose.
                if send_queue.num_lost() or (isinstance(error, PeerFailed) and self.detector.error is not None):
                    raise
            if send_queue.num_lost():
                count = send_queue.num_lost()
                raise PeerMissing(
                    f"Rank {to} has left before {count} {'value' if count == 1 else 'values'} sent to it arrived.",
                    ranks=[to],
                    where=str(self.world),
                    evidence=send_queue.error,
                    do=f"make sure rank {to} calls recv(source={self.world.rank}) once for every send(to={to})",
                )
        self.is_closed = True
        ignored = {source: len(messages) for source, messages in self.recv_queue.values.items() if messages}
        if ignored:
            count, senders = sum(ignored.values()), fold_ranks(list(ignored))
            warn(f"{count} of the values sent to this rank, by {senders}, were never received", all_ranks=True)
        if untaken := +self.recv_queue.count_untaken():
            warn(
                f"gradients arrived for {untaken.total()} of the values that this rank sent, from "
                f"{fold_ranks(list(untaken))}, but no backward() used them: call send(...).backward()",
                all_ranks=True,
            )
        _abandon(self._send_queues, self._server)
        self._store.close()


def current_endpoint(caller: str) -> Endpoint:
    """Return the endpoint of this session, opening it at the first call.

    Raises:
        NotJoined: no world has been joined.
        ConfigurationError: it has no other rank.
    """
    session = current()
    refuse_alone(caller, session.world)
    return session.once(_open)


def _open(session: Session) -> Endpoint:
    if session.store is None or session.detector is None:
        raise TypeError(f"a world of {session.world.world_size} ranks has no store")
    return Endpoint(session, session.store, session.detector)


def refuse_alone(caller: str, world: World) -> None:
    """Raise :class:`ConfigurationError` unless there is another rank."""
    if world.world_size == 1:
        raise ConfigurationError(
            f"{caller} needs another rank, but this is a world of one.",
            where=str(world),
            do="start at least two ranks (rankwise run -n 2 ...); "
            "on one rank, call the second part of the model with the output of the first part",
        )


def _abandon(send_queues: dict[int, SendQueue], server: AuthenticatedServer) -> None:
    for send_queue in send_queues.values():
        send_queue.give_up()
    server.close()
