# SPDX-License-Identifier: Apache-2.0
"""A worker's steps: it sends gradients to the servers and receives parameters."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.point_to_point.waiting import PeerWait, wait
from rankwise.errors import ConfigurationError, NotJoined
from rankwise.parameter_server.client import ServerConnection
from rankwise.parameter_server.messages import TensorRows
from rankwise.torch_private import foreach

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rankwise.parameter_server.checks import ServerSetup
    from rankwise.parameter_server.messages import Head, ServerMessage

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
        self._servers: list[ServerAddress] = []
        self._awaits_answer = False
        self._is_broken = False
        """Whether waiting for an answer was interrupted, as by Ctrl-C: this worker stops waiting for replies."""
        self._sent_groups: list[dict[str, Any]] | None = None

    def connect(self, servers: Sequence[ServerAddress], secret: bytes) -> None:
        """Connect to every server."""
        for server in servers:
            kept = [self._parameters[number] for number in server.numbers]
            channel = ServerConnection(self._setup.world.rank, kept, self._changed, server.ticket)
            self._servers.append(server)
            self.channels.append(channel)
            channel.open(server.host, server.port, secret, self._setup.detector.timeout_seconds)
        for server, channel in self._pairs():
            self._wait("connecting to a parameter server", server, channel, channel.has_connected)

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
            self._take()
        self.num_steps += 1
        head: Head = {"kind": "step", "weights": list(weights), "sums": list(sums)}
        if groups != self._sent_groups:
            head["groups"] = self._sent_groups = groups
        if self._loader_state is not None:
            head["loader"] = dict(self._loader_state())
        for server, channel in self._pairs():
            positions, rows = self._gradients(server)
            if not weights or not weights[-1]:
                # Parameters that backward used are updated, if only by momentum; the others stay.
                channel.request(head | {"zeros": positions}, [], rows)
            else:
                self._copy(server, positions, channel)
                channel.request(head, positions, rows)
        self._awaits_answer = True
        if not self._is_ahead:
            self._take()

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
        self._take()
        for channel in self.channels:
            channel.request({"kind": "end_loop", "loader": loader}, [], [])
        self._awaits_answer = True
        self._take()

    def leave(self) -> None:
        """Take the outstanding answers, and leave the servers."""
        if self._is_broken:
            close_all(self.channels)
            return
        self._take()
        for channel in self.channels:
            channel.leave()
        for server, channel in self._pairs():
            self._wait("leaving the parameter servers", server, channel, channel.has_left)
        # The optimizer keeps this worker, and the channels' memory is as large as the model.
        self.channels.clear()

    def _pairs(self) -> Iterator[tuple[ServerAddress, ServerConnection]]:
        return zip(self._servers, self.channels, strict=True)

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
    def _copy(self, server: ServerAddress, positions: Sequence[int], channel: ServerConnection) -> None:
        """Copy gradients into the outgoing buffer."""
        gradients = [self._parameters[server.numbers[position]].grad for position in positions]
        if gradients:
            views = [channel.outgoing.views[position] for position in positions]
            foreach.copy_(views, [one for one in gradients if one is not None])

    def _take(self) -> None:
        """Wait for the answers to the requests, and copy their parameters."""
        if not self._awaits_answer:
            return
        try:
            for server, channel in self._pairs():
                self._wait("optimizer.step()", server, channel, channel.has_answer)
                self._put_in_place(server, channel, channel.take())
        except BaseException:
            self._is_broken = True
            raise
        self._awaits_answer = False

    @torch.no_grad()
    def _put_in_place(self, server: ServerAddress, channel: ServerConnection, answer: ServerMessage) -> None:
        own = [self._parameters[number].detach() for number in server.numbers]
        whole = answer.head["whole"]
        if whole:
            foreach.copy_(
                [own[position] for position in whole], [channel.incoming.views[position] for position in whole]
            )
        for rows in answer.rows:
            parameter = own[rows.position]
            parameter.index_copy_(0, rows.indices.to(parameter.device), rows.values.to(parameter.device))
        self.num_updates = answer.head["updates"]

    def _wait(self, what: str, server: ServerAddress, channel: ServerConnection, is_there: Callable[[], bool]) -> None:
        peer_wait = PeerWait(
            what=what,
            peer=server.rank,
            detector=self._setup.detector,
            broken=lambda: channel.error,
            spare_seconds=SPARE_SECONDS,
            do=f"look at the output of rank {server.rank}, a parameter server, and of the slowest worker",
        )
        wait(peer_wait, self._changed, is_there)


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
