# SPDX-License-Identifier: Apache-2.0
"""This rank's end of all connections to other ranks: opened with the first message, closed on leaving the world.

Every rank serves its own socket, published in the job's store, and accepts only peers that hold a secret from
there. Sending does not wait for the peer: torch's own channels (an NCCL communicator, a Gloo group of two) open
only when both sides arrive, so a ring of ranks that all send first would never start. A queue of messages and a
thread to each rank sends them; the server's thread fills the queue of received ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import secrets
import socket
import threading
import weakref
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.point_to_point.message import sizes_of
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, NotJoined, PeerFailed, PeerMissing, RankwiseError, fold_ranks
from rankwise.health import diagnosis, process_probe
from rankwise.health.collective_timeout import PeerWait, wait_for_peer
from rankwise.health.event_log import ProcessEnded, post
from rankwise.health.failure_detector import EXPLANATION_SECONDS
from rankwise.log import warn
from rankwise.store import bootstrap
from rankwise.store.server import AuthenticatedServer
from rankwise.store.wire import as_sent, fill_on_loop, json_frame, listen, open_connection, receive_frame_on_loop
from rankwise.tensors.arrays import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rankwise.comm.session import Session
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.store.client import Store
    from rankwise.world.facts import World


PURPOSE = "point_to_point"
KEYS = "rankwise/point_to_point"
FIRST_PAUSE_SECONDS = 0.002
LONGEST_PAUSE_SECONDS = 0.1
LEFT = "it has left"


def address_key(rank: int) -> str:
    """Return the store's key for a rank's address."""
    return f"{KEYS}/address/{rank}"


class SendQueue:
    """The messages to one rank."""

    def __init__(
        self, *, rank: int, to: int, store: Store, secret: bytes, timeout_seconds: float, changed: threading.Condition
    ) -> None:
        """Start the thread, which connects to the server of rank ``to`` within ``timeout_seconds``.

        ``store`` holds that rank's address and is used only by the thread; ``changed`` is notified when everything was
        sent, or the connection broke.
        """
        self.error: str | None = None
        """Why nothing more can be sent."""
        self.is_over = False
        """Whether the thread has ended; messages not delivered by then never will be."""
        self._rank = rank
        self._to = to
        self._store = store
        self._secret = secret
        self._timeout_seconds = timeout_seconds
        self._changed = changed
        self._queue: queue.SimpleQueue[list[bytes | memoryview] | None] = queue.SimpleQueue()
        self._given_up = threading.Event()
        self._unconfirmed: deque[bool] = deque()
        """For each message that was sent but not confirmed, whether it is a value."""
        self._thread = threading.Thread(target=self._run, name=f"rankwise-to-{to}", daemon=True)
        self._thread.start()

    def put(self, head: dict[str, Any], buffers: Sequence[memoryview]) -> None:
        """Append a message to the queue."""
        self._unconfirmed.append(head["kind"] == "value")
        self._queue.put(as_sent(json_frame(head), buffers))

    def end(self) -> None:
        """End the thread once every message has arrived."""
        self._queue.put(None)

    def give_up(self) -> None:
        """End the thread as soon as possible."""
        self._given_up.set()
        self._queue.put(None)

    def num_lost(self) -> int:
        """Return how many values are not confirmed."""
        return sum(list(self._unconfirmed))

    def _run(self) -> None:
        try:
            sock = self._connected()
            if sock is not None:
                with sock:
                    self._send_all(sock)
        except (OSError, RankwiseError) as error:
            self.error = str(error) or type(error).__name__
        finally:
            self._store.close()
            with self._changed:
                self.is_over = True
                self._changed.notify_all()

    def _connected(self) -> socket.socket | None:
        """Return the connection, waiting until the other rank listens; ``None`` after :meth:`give_up`."""
        pause = FIRST_PAUSE_SECONDS
        key = address_key(self._to)
        # Torch's stores would wait in C++, where the thread cannot be stopped.
        while not self._store.check(key):
            if self._given_up.wait(pause):
                return None
            pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)
        host, port = json.loads(self._store.get(key, self._timeout_seconds))
        return open_connection(host, port, self._secret, PURPOSE, self._timeout_seconds)

    def _send_all(self, sock: socket.socket) -> None:
        try:
            sock.sendall(json_frame({"rank": self._rank}))
            while (message := self._queue.get()) is not None:
                for piece in message:
                    sock.sendall(piece)
                with contextlib.suppress(BlockingIOError):
                    self._confirm(sock.recv(4096, socket.MSG_DONTWAIT))
            if self._given_up.is_set():
                return
            with contextlib.suppress(OSError):  # a rank that received everything may have left
                sock.sendall(json_frame({"kind": "end"}))
                sock.shutdown(socket.SHUT_WR)
        finally:
            # Even after the connection broke: messages confirmed before have arrived.
            with contextlib.suppress(OSError):
                while self._unconfirmed and not self._given_up.is_set():
                    self._confirm(sock.recv(4096))

    def _confirm(self, confirmations: bytes) -> None:
        if not confirmations:
            raise ConnectionError("the other rank ended the connection")
        for _ in confirmations:
            self._unconfirmed.popleft()


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message from another rank."""

    head: dict[str, Any]
    buffers: list[torch.Tensor]


class RecvQueue:
    """Received messages by rank: values in the order they were sent, gradients by the value they belong to."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held for every access to the rest; notified whenever something was received, sent or closed."""
        self.values: defaultdict[int, deque[ReceivedMessage]] = defaultdict(deque)
        self.gradients: dict[tuple[int, int], deque[ReceivedMessage]] = {}
        """Gradients of the values whose ``backward()`` may still be called."""
        self.untaken: Counter[int] = Counter()
        """How many gradients a rank sent for values whose ``backward()`` never used them."""
        self.ended: dict[int, str] = {}
        """Why a rank sends nothing more."""

    def expect(self, rank: int, number: int) -> None:
        """Keep the gradients of a value that was sent to ``rank``."""
        with self.changed:
            self.gradients[rank, number] = deque()

    def forget(self, rank: int, number: int) -> None:
        """Discard gradients that can no longer be used."""
        # Garbage collection may call this in a thread that holds the lock: removing one key needs none.
        self._count(rank, self.gradients.pop((rank, number), ()))

    async def serve(self, sock: socket.socket) -> None:
        """Receive all messages of one rank until it closes, and confirm each with a byte."""
        source = int(json.loads(await receive_frame_on_loop(sock))["rank"])
        reason = "the connection ended"
        try:
            while True:
                head: dict[str, Any] = json.loads(await receive_frame_on_loop(sock))
                if head["kind"] == "end":
                    reason = LEFT
                    return
                message = ReceivedMessage(head, [await _buffer(sock, size) for size in sizes_of(head["tree"])])
                with self.changed:
                    self._put(source, message)
                    self.changed.notify_all()
                await asyncio.get_running_loop().sock_sendall(sock, b"\0")
        finally:
            with self.changed:
                self.ended[source] = reason
                self.changed.notify_all()

    def count_untaken(self) -> Counter[int]:
        """Return how many gradients from each rank are unused so far."""
        for (rank, number), waiting in list(self.gradients.items()):
            if waiting:
                self.forget(rank, number)
        return self.untaken

    def _count(self, rank: int, waiting: Iterable[ReceivedMessage]) -> None:
        self.untaken[rank] += sum(message.head["kind"] == "gradients" for message in waiting)

    def _put(self, source: int, message: ReceivedMessage) -> None:
        if message.head["kind"] == "value":
            self.values[source].append(message)
        else:
            waiting = self.gradients.get((source, int(message.head["number"])))
            if waiting is not None:
                waiting.append(message)
            else:
                self._count(source, [message])


async def _buffer(sock: socket.socket, size: int) -> torch.Tensor:
    """Return the next ``size`` bytes, read into the memory that the value will have."""
    buffer = torch.empty(size, dtype=torch.uint8)
    await fill_on_loop(sock, memory_of(buffer))
    return buffer


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
        wait_for_peer(peer_wait, self.recv_queue.changed, is_there)

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


def watch_ring(endpoint: Endpoint) -> Callable[[], RankwiseError | None]:
    """Connect to the next rank; return a function that returns the error of the one before if it has exited.

    The kernel closes a connection when a process exits, however that happens. NCCL does not notice a peer that has
    exited, nor does a launcher that is not rankwise's report it.

    Called by: every rank. The function reports a rank that has exited to all others, unless its launcher does.
    """
    rank, world_size = endpoint.world.rank, endpoint.world.world_size
    detector = endpoint.detector
    before = (rank - 1) % world_size
    endpoint.open_way((rank + 1) % world_size)

    def broken() -> RankwiseError | None:
        if endpoint.is_closed or endpoint.recv_queue.ended.get(before, LEFT) == LEFT:
            return None
        with detector.changed:
            detector.changed.wait_for(
                lambda: detector.error is not None or detector.departed(before), EXPLANATION_SECONDS
            )
        process = process_probe.process_of(detector.store, before)
        if detector.error is not None or detector.departed(before) or process is None:
            return detector.error
        if not diagnosis.unanswered(detector.poll_status(), [before]):
            # It has not exited: only this connection broke, and it is not needed for anything else.
            endpoint.recv_queue.ended[before] = LEFT
            return None
        event = ProcessEnded(before, "A collective", process.pid)
        post(detector.store, event, detector.next_event)
        return diagnosis.peer_ended(detector.world, event)

    return broken
