# SPDX-License-Identifier: Apache-2.0
"""A worker's steps: it sends gradients to the servers and receives parameters.

Each server has a connection with a thread of its own, which sends the main thread's messages and receives the answers.
The next message is sent only after the last was answered. At most one step waits behind an unanswered one, since a
worker takes its answer before its next step; loops without steps are counted. So a slow or stopped server makes a
worker wait in its next step, and fills the memory of neither.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankwise.errors import ConfigurationError, NotJoined, RankwiseError
from rankwise.health.collective_timeout import PeerWait, wait_for_peer
from rankwise.parameter_server.messages import (
    PURPOSE,
    ServerMessage,
    TensorBuffer,
    TensorRows,
    create_memory,
    open_memory,
    packed,
    receive_buffers,
)
from rankwise.store.wire import fill, json_frame, open_connection, receive_frame
from rankwise.torch_private.tensors import foreach_copy_

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankwise.parameter_server.checks import ServerSetup
    from rankwise.parameter_server.messages import Head

SPARE_SECONDS = 10.0
"""How much longer than the servers a worker waits: they report the rank that everyone waits for."""


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """One server, as its workers reach it."""

    rank: int
    host: str
    port: int
    numbers: Sequence[int]
    """Of the parameters that it keeps."""
    ticket: str
    """Of the memory that it shares with workers of its host; empty if this worker cannot open it."""


class ServerConnection:
    """The connection to one server, from the first message to ``close``.

    Its many fields are shared by two threads under one condition: what is sent, what arrives, and whether it is open.

    Args:
        rank: of this worker.
        server: that it connects to.
        parameters: that the server keeps.
        changed: notified when an answer arrives, or the connection breaks.
    """

    def __init__(
        self, rank: int, server: ServerAddress, parameters: Sequence[torch.Tensor], changed: threading.Condition
    ) -> None:
        self.server = server
        self.outgoing = TensorBuffer(parameters)
        """Tensors for the server; written while no request is open."""
        self.incoming = TensorBuffer(parameters)
        """Tensors from the server; read while no request is open."""
        self.is_shared = False
        """Whether both are memory that the server has mapped too."""
        self._parameters = parameters
        self.error: str | None = None
        """Why requests are no longer possible."""
        self._is_connected = False
        self._rank = rank
        self._changed = changed
        self._answer: ServerMessage | None = None
        self._outbox: queue.SimpleQueue[list[bytes | memoryview] | Counter[int] | None] = queue.SimpleQueue()
        self._loops: Counter[int] | None = None
        """Loops without steps, by loader: the last entry of the outbox, while it is there and more can be counted."""
        self._is_over = False
        self._socket: socket.socket | None = None

    def open(self, secret: bytes, timeout_seconds: float) -> None:
        """Begin to connect, with the secret of the job."""
        arguments = (secret, timeout_seconds)
        threading.Thread(target=self._run, args=arguments, name="rankwise-to-server", daemon=True).start()

    def request(self, head: Head, positions: Sequence[int], rows: Sequence[TensorRows]) -> None:
        """Send a message with tensors of ``outgoing`` by position and rows of others; then receive its answer."""
        message = packed(head, self.outgoing, positions, rows, is_shared=self.is_shared)
        with self._changed:
            self._loops = None
            self._outbox.put(message)

    def end_loop(self, loader: int) -> None:
        """Notify the server that a loop without steps is over, without waiting."""
        with self._changed:
            if self._loops is None:
                self._loops = Counter()
                self._outbox.put(self._loops)
            self._loops[loader] += 1

    def has_connected(self) -> bool:
        """Return whether the server accepts requests."""
        return self._is_connected

    def has_answer(self) -> bool:
        """Return whether the answer to the request has arrived."""
        return self._answer is not None

    def pop_answer(self) -> ServerMessage:
        """Return the answer that has arrived; its whole tensors are in ``incoming``."""
        answer, self._answer = self._answer, None
        if answer is None:
            raise RuntimeError("no reply was received")
        return answer

    def leave(self) -> None:
        """Announce that no request follows, and close."""
        self._outbox.put(None)

    def has_left(self) -> bool:
        """Return whether the server has been notified, or no longer can be."""
        return self._is_over

    def close(self) -> None:
        """Close at once."""
        self._outbox.put(None)
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):  # It is closed already.
                sock.shutdown(socket.SHUT_RDWR)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self, secret: bytes, timeout_seconds: float) -> None:
        try:
            with open_connection(self.server.host, self.server.port, secret, PURPOSE, timeout_seconds) as sock:
                self._socket = sock
                self._talk(sock)
        except (OSError, RankwiseError) as error:
            self.error = str(error) or type(error).__name__
        finally:
            self._socket = None
            with self._changed:
                self.error = self.error or "the connection was closed"
                self._is_over = True
                self._changed.notify_all()

    def _talk(self, sock: socket.socket) -> None:
        self._greet(sock)
        with self._changed:
            self._is_connected = True
            self._changed.notify_all()
        while (message := self._outbox.get()) is not None:
            if isinstance(message, Counter):
                sock.sendall(self._loops_ended(message))
                receive_frame(sock)
                continue
            for piece in message:
                sock.sendall(piece)
            head = json.loads(receive_frame(sock))
            memory, rows = receive_buffers(head, self.incoming, is_shared=self.is_shared)
            for piece in memory:
                fill(sock, piece)
            with self._changed:
                self._answer = ServerMessage(head, rows)
                self._changed.notify_all()
        sock.sendall(json_frame({"kind": "leave"}))

    def _loops_ended(self, loops: Counter[int]) -> bytes:
        with self._changed:
            if self._loops is loops:
                self._loops = None
        return json_frame({"kind": "end_loops", "loops": [*loops.items()], "whole": [], "rows": []})

    def _greet(self, sock: socket.socket) -> None:
        """Send this worker's rank, and share memory with a server that can."""
        theirs = open_memory(self.server.ticket, self._parameters)
        own = None if theirs is None else create_memory(self._parameters)
        sock.sendall(json_frame({"worker": self._rank, "memory": "" if own is None else own.ticket}))
        self.is_shared = bool(json.loads(receive_frame(sock))["is_shared"])
        for mapping in (own, theirs):
            if mapping is not None:
                mapping.settle()
        if self.is_shared:
            self.outgoing, self.incoming = TensorBuffer(self._parameters, own), TensorBuffer(self._parameters, theirs)


class Worker:
    """One worker's connections to all servers, from ``parameter_server`` to the end of the world.

    Args:
        setup: of all ranks.
        is_ahead: whether a step begins before the servers have answered the previous one.
    """

    def __init__(self, setup: ServerSetup, *, is_ahead: bool) -> None:
        self.num_steps = 0
        self.num_updates = 0
        """How many the servers had made at their last answer."""
        self._loader_state: Callable[[], Mapping[str, Any]] | None = None
        self._setup = setup
        self._parameters = setup.parameters
        self._is_ahead = is_ahead
        self._changed = threading.Condition()
        self.channels: list[ServerConnection] = []
        """One to each server, until this worker leaves."""
        self._awaits_answer = False
        self._is_broken = False
        """Whether waiting for an answer was interrupted, as by Ctrl-C: this worker stops waiting for replies."""
        self._sent_groups: list[dict[str, Any]] | None = None

    def connect(self, servers: Sequence[ServerAddress], secret: bytes) -> None:
        """Connect to every server."""
        for server in servers:
            kept = [self._parameters[number] for number in server.numbers]
            channel = ServerConnection(self._setup.world.rank, server, kept, self._changed)
            self.channels.append(channel)
            channel.open(secret, self._setup.detector.timeout_seconds)
        for channel in self.channels:
            self._wait("connecting to a parameter server", channel, channel.has_connected)

    def report_loader(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Send ``state()``, the position of the training loop, with each step for the snapshots."""
        self._loader_state = state

    def step(self, weights: Sequence[float], sums: Sequence[bool], groups: list[dict[str, Any]]) -> None:
        """Send the gradients, and receive the parameters.

        Args:
            weights: the number of samples of each backward since the last step.
            sums: whether its gradients are a sum over them, not a mean.
            groups: options of the optimizer's groups.

        Raises:
            ConfigurationError: no backward computed the gradients.
            NotJoined: this worker has left.
        """
        if not self.channels:
            raise left("optimizer.step()")
        if not weights and self._have_gradients():
            raise ConfigurationError(
                "optimizer.step() found gradients that no backward() since the last step computed.",
                do="call backward() once before each step; with several microsteps, run the last one outside "
                "rankwise.no_sync(model)",
            )
        if self._is_ahead:
            self._receive_answers()
        self.num_steps += 1
        head: Head = {"kind": "step", "weights": list(weights), "sums": list(sums)}
        if groups != self._sent_groups:
            head["groups"] = self._sent_groups = groups
        if self._loader_state is not None:
            head["loader"] = dict(self._loader_state())
        for channel in self.channels:
            positions, rows = self._gradients(channel.server)
            if not weights or not weights[-1]:
                # Parameters that backward used are updated, if only by momentum; the others stay.
                channel.request(head | {"zeros": positions}, [], rows)
            else:
                self._copy(channel, positions)
                channel.request(head, positions, rows)
        self._awaits_answer = True
        if not self._is_ahead:
            self._receive_answers()

    def end_loop(self, loader: int, *, has_stepped: bool) -> None:
        """Notify the servers that a loop is over, and take the newest parameters if steps were taken in it.

        Without steps it does not wait: this worker may be the only one that ran such a loop.
        """
        if self._is_broken:
            return
        if not self.channels:
            raise left("server.finish()")
        if not has_stepped:
            for channel in self.channels:
                channel.end_loop(loader)
            return
        self._receive_answers()
        for channel in self.channels:
            channel.request({"kind": "end_loop", "loader": loader}, [], [])
        self._awaits_answer = True
        self._receive_answers()

    def leave(self) -> None:
        """Take the outstanding answers, and leave the servers."""
        if self._is_broken:
            close_all(self.channels)
            return
        self._receive_answers()
        for channel in self.channels:
            channel.leave()
        for channel in self.channels:
            self._wait("leaving the parameter servers", channel, channel.has_left)
        # The optimizer keeps this worker, and the channels' memory is as large as the model.
        self.channels.clear()

    def _have_gradients(self) -> bool:
        """Return whether there is a gradient that is not zero."""
        gradients = [parameter.grad for parameter in self._parameters]
        return any(bool((g.coalesce().values() if g.is_sparse else g).any()) for g in gradients if g is not None)

    def _gradients(self, server: ServerAddress) -> tuple[list[int], list[TensorRows]]:
        """Return the positions of the parameters with dense gradients, and the rows of the sparse gradients."""
        whole: list[int] = []
        rows: list[TensorRows] = []
        for position, number in enumerate(server.numbers):
            gradient = self._parameters[number].grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                added = gradient.coalesce()
                if added.sparse_dim() != 1:
                    raise ConfigurationError(
                        f"The gradient of {self._setup.names[number]} is sparse in {added.sparse_dim()} dimensions.",
                        do="parameter_server supports dense gradients and row-sparse gradients such as those "
                        "of nn.Embedding",
                    )
                rows.append(TensorRows(position, added.indices()[0].cpu(), added.values().detach().cpu().contiguous()))
            else:
                whole.append(position)
        return whole, rows

    @torch.no_grad()
    def _copy(self, channel: ServerConnection, positions: Sequence[int]) -> None:
        """Copy gradients into the outgoing buffer."""
        gradients = [self._parameters[channel.server.numbers[position]].grad for position in positions]
        if gradients:
            views = [channel.outgoing.views[position] for position in positions]
            foreach_copy_(views, [one for one in gradients if one is not None])

    def _receive_answers(self) -> None:
        """Wait for the answers to the requests, and copy their parameters."""
        if not self._awaits_answer:
            return
        try:
            for channel in self.channels:
                self._wait("optimizer.step()", channel, channel.has_answer)
                self._put_in_place(channel, channel.pop_answer())
        except BaseException:
            self._is_broken = True
            raise
        self._awaits_answer = False

    @torch.no_grad()
    def _put_in_place(self, channel: ServerConnection, answer: ServerMessage) -> None:
        own = [self._parameters[number].detach() for number in channel.server.numbers]
        whole = answer.head["whole"]
        if whole:
            foreach_copy_(
                [own[position] for position in whole], [channel.incoming.views[position] for position in whole]
            )
        for rows in answer.rows:
            parameter = own[rows.position]
            parameter.index_copy_(0, rows.indices.to(parameter.device), rows.values.to(parameter.device))
        self.num_updates = answer.head["updates"]

    def _wait(self, what: str, channel: ServerConnection, is_there: Callable[[], bool]) -> None:
        rank = channel.server.rank
        peer_wait = PeerWait(
            what=what,
            peer=rank,
            detector=self._setup.detector,
            broken=lambda: channel.error,
            spare_seconds=SPARE_SECONDS,
            do=f"look at the output of rank {rank}, a parameter server, and of the slowest worker",
        )
        wait_for_peer(peer_wait, self._changed, is_there)


def left(what: str) -> NotJoined:
    """Return the error for calling ``what`` after the world of the parameter servers was left."""
    return NotJoined(
        f"{what} was called after the world of the parameter servers ended.",
        do="call it within the world; to continue on one process, load model.state_dict() into a new model with "
        "its own optimizer",
    )


def close_all(channels: Sequence[ServerConnection]) -> None:
    """Close connections at once."""
    for channel in channels:
        channel.close()
