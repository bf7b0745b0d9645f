# SPDX-License-Identifier: Apache-2.0
"""The other ranks, as rank zero sees them: what it asks them for, and what they have of the script's modules."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Self
from weakref import WeakKeyDictionary

import torch

from rankwise.auto.connection import Backward, End, Failed, Forward, Rows
from rankwise.auto.rows import OwnArguments, Share
from rankwise.auto.settings import settings
from rankwise.auto.shipping import (
    TensorsOfModule,
    TensorTable,
    broadcast,
    dumped,
    dumped_tree,
)
from rankwise.errors import RankwiseError
from rankwise.health.call_site import user_call_site
from rankwise.health.collective_timeout import CollectiveWait, PeerEnded
from rankwise.health.flight_recorder import Ticket
from rankwise.health.process_probe import process_of, this_process
from rankwise.torch_private.modules import BatchNorm
from rankwise.torch_private.tensors import TreeSpec, tree_flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from torch import nn

    from rankwise.auto.connection import Backward, Connection
    from rankwise.auto.coupling import CouplingWatch
    from rankwise.auto.known import ModuleCall
    from rankwise.auto.rows import OwnCalls
    from rankwise.auto.settings import GeneratorStates
    from rankwise.comm.backends.protocol import Exchange


class ServerFailed(Exception):
    """A server has raised where rank zero has not."""

    def __init__(self, rank: int, failed: Failed) -> None:
        super().__init__(f"{failed.kind} on rank {rank}: {failed.text}")


@dataclass(slots=True)
class Ran:
    """A call that has run on all ranks."""

    number: int
    share: Share
    """Rank zero's."""
    own: OwnArguments
    outputs: list[Any]
    """Rank zero's, flat."""
    structure: TreeSpec
    others: list[list[Any]]
    """The outputs of the other ranks."""
    meets: bool
    """Whether ranks exchange statistics within it."""

    def take_others(self) -> list[list[Any]]:
        """Return the outputs of the other ranks, and drop them."""
        others, self.others = self.others, []
        return others

    def free(self) -> None:
        """Drop this rank's graph."""
        self.outputs, self.own = [], OwnArguments((), (), self.own.tree)


@dataclass(slots=True)
class _Copied:
    """What servers have of a module of the script."""

    held: TensorsOfModule
    num_changes: int
    """Of what its calls read, when it was sent or pickled last."""
    is_sent: bool = False
    pickled: bytes | None = None
    """As it is to be sent."""


class Servers:
    """Asks the other ranks for their rows of calls, until the script ends."""

    def __init__(self, connections: Sequence[Connection], exchange: Exchange, own: OwnCalls) -> None:
        self.exchange = exchange
        self.own = own
        self._connections = list(connections)
        self._num_pending = [0] * len(connections)
        self._table = TensorTable(is_shared=self.share_memory, num_servers=len(connections))
        self._modules: WeakKeyDictionary[nn.Module, _Copied] = WeakKeyDictionary()
        self._kinds: set[int] = set()
        """Numbers of the kinds of calls of which servers know the structure of the arguments."""
        self._num_calls = 0
        self._graphs: dict[weakref.ref[object], int] = {}
        """Calls that a backward may follow, by what ends with their graph."""
        self._ended: list[weakref.ref[object]] = []
        self._forgotten: list[int] = []
        os.register_at_fork(after_in_child=self._leave_to_parent)

    @property
    def add_together(self) -> bool:
        """Whether all ranks add gradients. For two that share memory it is least work if rank zero does."""
        return len(self._connections) > 1 or not self.share_memory

    @property
    def share_memory(self) -> bool:
        """Whether all ranks share memory."""
        return all(one.is_local for one in self._connections)

    def copy_module(self, call: ModuleCall) -> None:
        """Copy what a call reads of its module, which may run before servers are asked for it.

        Raises:
            Exception: the module cannot be sent.
        """
        copied = self._copied(call)
        if not copied.is_sent:
            copied.pickled = dumped(call.module, self._table.number_of)
        self._table.copy(copied.held)

    def call(
        self,
        call: ModuleCall,
        module: nn.Module,
        arguments: OwnArguments,
        num_global: int,
        *,
        generators: GeneratorStates | None,
        watch: CouplingWatch | None = None,
    ) -> Ran:
        """Have every rank compute its rows of a call.

        Args:
            call: the script's.
            module: to call here: the script's, or a copy of it in a trial of a call that has run.
            arguments: of the whole batch.
            num_global: its number of rows.
            generators: their states before the call, if it draws.
            watch: follows the samples through the call here, in a trial.

        Raises:
            Exception: what the call raises here.
            ServerFailed: it raises on a server.
        """
        copied = self._copied(call)
        if watch is None:
            self._table.copy(copied.held)
        message, sent = self._message(call, copied, module, arguments, num_global, generators=generators)
        pairs = list(zip(arguments.leaves, arguments.dims, strict=True))
        share = Share(0, self.exchange.world_size, num_global)
        for rank in range(1, share.num_ranks):
            of_rank = share.of(rank)
            rows = [_rows_of(one.detach(), dim, of_rank) for one, dim in pairs if isinstance(one, torch.Tensor)]
            self._send(rank, message, rows if message.values.by_broadcast else [*sent, *rows])
        if message.values.by_broadcast:
            broadcast(sent, self.exchange)
        copied.is_sent, copied.pickled = True, None
        self._kinds.add(call.kind.number)
        leaves = [
            _rows_of(one.detach(), dim, share).requires_grad_(one.requires_grad and message.has_graph)
            if isinstance(one, torch.Tensor)
            else one
            for one, dim in pairs
        ]
        own = OwnArguments(leaves, arguments.dims, arguments.tree)
        try:
            result = self.own.run(module, call.kind.draws, share, own, meets=message.meets, watch=watch)
            outputs, tree = tree_flatten(result)
            return Ran(message.call, share, own, outputs, tree, self.replies(), message.meets)
        except BaseException:
            self.forget(message.call)
            raise

    def _message(
        self,
        call: ModuleCall,
        copied: _Copied,
        module: nn.Module,
        arguments: OwnArguments,
        num_global: int,
        *,
        generators: GeneratorStates | None,
    ) -> tuple[Forward, list[torch.Tensor]]:
        """Return what asks servers for their rows of a call, and the values that are sent with it."""
        pickled = None if copied.is_sent else copied.pickled or dumped(call.module, self._table.number_of)
        structure = None if call.kind.number in self._kinds else dumped_tree(call.tree)
        self.prepare()
        values, sent = self._table.message(copied.held)
        self._num_calls += 1
        ended = self._ended[:]
        del self._ended[: len(ended)]
        forgotten, self._forgotten = [*self._forgotten, *map(self._graphs.pop, ended)], []
        message = Forward(
            call=self._num_calls,
            module=call.known.number,
            kind=call.kind.number,
            pickled=pickled,
            values=values,
            forgotten=forgotten,
            structure=structure,
            leaves=[
                Rows(one.requires_grad, one.device.type == "cpu") if isinstance(one, torch.Tensor) else one
                for one in arguments.leaves
            ],
            dims=tuple(arguments.dims),
            num_global=num_global,
            has_graph=torch.is_grad_enabled(),
            meets=any(isinstance(one, BatchNorm) and one.training for one in module.modules()),
            settings=settings(),
            generators=generators,
        )
        return message, sent

    def backward(self, message: Backward, tensors: Callable[[int], list[torch.Tensor]]) -> None:
        """Start the backward of a call on servers; ``tensors`` returns what goes to a rank."""
        self.prepare()
        for rank in range(1, self.exchange.world_size):
            self._send(rank, message, tensors(rank))

    def replies(self) -> list[list[Any]]:
        """Return the values that servers reply, by rank.

        Raises:
            ServerFailed: what was asked for has raised on a server.
        """
        replies = [self._receive(place) for place in range(len(self._connections))]
        for rank, (reply, _) in enumerate(replies, 1):
            if isinstance(reply, Failed):
                raise ServerFailed(rank, reply)
        return [_filled(reply.leaves, tensors) for reply, tensors in replies]

    def restore_buffers(self, module: nn.Module) -> None:
        """Give the buffers of a module their values from before the last call."""
        if (copied := self._modules.get(module)) is not None:
            copied.held.restore_buffers()

    @property
    def have_failed(self) -> bool:
        """Whether the job has: no call may run whole instead of a split one."""
        return self.exchange.detector.error is not None

    def check(self) -> None:
        """Raise the error of the job, if it has failed."""
        if self.exchange.detector.error is not None:
            raise self.exchange.detector.error

    def prepare(self) -> None:
        """Take in the replies to what has failed here, before something else is asked for.

        Raises:
            RankwiseError: the job has failed.
        """
        self.check()
        for place, num in enumerate(self._num_pending):
            for _ in range(num):
                self._receive(place)

    def forget(self, call: int) -> None:
        """Record that no backward of a call will follow."""
        self._forgotten.append(call)

    def forget_with(self, node: object, call: int) -> None:
        """Record that no backward of a call will follow once a node of the graph exists no more."""
        # No function of Python: a signal's handler could run in it, and Python drops what is raised there.
        self._graphs[weakref.ref(node, self._ended.append)] = call

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the end of the connection says all: servers have nothing to report.
        for connection in self._connections:
            if error is None:
                with suppress(ConnectionError):  # its launcher says what has become of it
                    connection.send(End())
            connection.close()

    def _copied(self, call: ModuleCall) -> _Copied:
        """Return what servers have, or are to have, of a module as it is now."""
        copied, num_changes = self._modules.get(call.module), call.known.num_changes
        if copied is None or copied.num_changes != num_changes or not copied.held.is_current():
            copied = self._modules[call.module] = _Copied(TensorsOfModule(call.module, self._table), num_changes)
        return copied

    def _leave_to_parent(self) -> None:
        """Close what a forked process has of the connections: servers notice when its parent ends."""
        while self._connections:
            self._connections.pop().close()

    def _send(self, rank: int, message: object, tensors: Sequence[torch.Tensor]) -> None:
        try:
            self._connections[rank - 1].send(message, tensors)
        except (ConnectionError, RankwiseError) as error:
            self._raise_loss(rank, error)
        self._num_pending[rank - 1] += 1

    def _receive(self, place: int) -> tuple[Any, list[torch.Tensor]]:
        try:
            reply = self._connections[place].receive()
        except (ConnectionError, RankwiseError) as error:
            self._raise_loss(place + 1, error)
        self._num_pending[place] -= 1
        return reply

    def _raise_loss(self, rank: int, error: Exception) -> NoReturn:
        """Raise what has become of a server that has closed its connection, or does not reply."""
        detector = self.exchange.detector
        try:
            if isinstance(error, RankwiseError):
                raise error
            process = process_of(detector.store, rank)
            with CollectiveWait(detector, Ticket(0, "a split call", site=user_call_site())):
                if process is not None and process.host != this_process().host:
                    raise RuntimeError(str(error))  # its host may be out of reach
                raise PeerEnded(rank, 0 if process is None else process.pid)
        except RankwiseError as known:
            detector.refuse_all(known)
            raise


def _rows_of(tensor: torch.Tensor, dim: int | None, share: Share) -> torch.Tensor:
    return tensor if dim is None else share.rows(tensor, dim)


def _filled(leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return flat values with the tensors that were sent with them in their places."""
    received = iter(tensors)
    return [next(received) if isinstance(one, Rows) else one for one in leaves]
