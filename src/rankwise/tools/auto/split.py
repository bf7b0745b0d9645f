# SPDX-License-Identifier: Apache-2.0
"""One split call on rank zero: its rows here, the others' on servers, and the whole result as one node of the graph."""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from rankwise.errors import RankwiseError
from rankwise.health.call_site import user_call_site
from rankwise.health.collective_timeout import CollectiveWait, PeerEnded
from rankwise.health.event_log import post_departure
from rankwise.health.flight_recorder import Ticket
from rankwise.health.process_probe import this_process
from rankwise.health.status_poll import process_of
from rankwise.log import log
from rankwise.parallel.randomness.sample_layout import SampleLayout
from rankwise.parallel.randomness.scope import memory_order
from rankwise.tools.auto.messages import Backward, End, Failed, Forward, Rows
from rankwise.tools.auto.own_call import OwnArguments, added, added_together, gradients, is_interruption
from rankwise.tools.auto.rows import OutputRows, Share, joined, part_of
from rankwise.tools.auto.settings import settings
from rankwise.torch_private import tree as pytree
from rankwise.torch_private.autograd import hooks_of_gradient, keeps_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from types import TracebackType

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.parallel.randomness.model_draws import DrawsOfModel
    from rankwise.tools.auto.connection import Connection
    from rankwise.tools.auto.coupling import CouplingWatch
    from rankwise.tools.auto.generators import GeneratorStates
    from rankwise.tools.auto.messages import Values
    from rankwise.tools.auto.own_call import OwnCalls

_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)
"""As torch says it."""


class ServerFailed(Exception):
    """A server has raised where rank zero has not."""

    def __init__(self, rank: int, failed: Failed) -> None:
        super().__init__(f"{failed.kind} on rank {rank}: {failed.text}")


class ResultChanged(Exception):
    """A split call has returned something else than its earlier ones."""


@dataclass(frozen=True, slots=True)
class Request:
    """What servers must know of a call beside its arguments."""

    module: int
    kind: int
    shipped: bytes | None
    values: Values
    sent: list[torch.Tensor]
    """The values that go with the message."""
    structure: bytes | None
    """Of the arguments, if servers do not know this kind of call."""
    num_global: int
    meets: bool
    generators: GeneratorStates | None


class Servers:
    """The other ranks, as rank zero sees them."""

    def __init__(self, connections: Sequence[Connection], exchange: Exchange, own: OwnCalls) -> None:
        self.exchange = exchange
        self._own = own
        self._connections = list(connections)
        self._num_pending = [0] * len(connections)
        self._is_in_step = True
        """Whether servers know what they must, and no message has been interrupted half way."""
        self._has_given_up = False
        self._num_calls = 0
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

    def call(
        self,
        module: nn.Module,
        draws: DrawsOfModel,
        request: Request,
        arguments: OwnArguments,
        watch: CouplingWatch | None = None,
    ) -> SplitCall:
        """Have every rank compute its rows of a call.

        Args:
            module: to call here.
            draws: of this kind of calls.
            request: what servers are asked for.
            arguments: of the whole batch.
            watch: follows the samples through the call here.

        Raises:
            Exception: what the call raises here.
            ServerFailed: it raises on a server.
        """
        self._num_calls += 1
        has_graph = torch.is_grad_enabled()
        forgotten, self._forgotten = self._forgotten, []
        pairs = list(zip(arguments.leaves, arguments.dims, strict=True))
        message = Forward(
            self._num_calls,
            request.module,
            request.kind,
            request.shipped,
            request.values,
            forgotten,
            request.structure,
            [_sent(one) if isinstance(one, torch.Tensor) else one for one in arguments.leaves],
            tuple(arguments.dims),
            request.num_global,
            has_graph,
            request.meets,
            settings(),
            request.generators,
        )
        share = Share(0, self.exchange.world_size, request.num_global)
        for rank in range(1, share.num_ranks):
            of_rank = share.of(rank)
            rows = [_rows_of(one.detach(), dim, of_rank) for one, dim in pairs if isinstance(one, torch.Tensor)]
            self._send(rank, message, [*request.sent, *rows])
        self._is_in_step = True
        leaves = [
            _rows_of(one.detach(), dim, share).requires_grad_(one.requires_grad and has_graph)
            if isinstance(one, torch.Tensor)
            else one
            for one, dim in pairs
        ]
        own = OwnArguments(leaves, arguments.dims, arguments.tree)
        try:
            result = self._own.run(module, draws, share, own, meets=request.meets, watch=watch)
        except BaseException as error:
            self._note_interruption(error, meets=request.meets)
            raise
        outputs, structure = pytree.tree_flatten(result)
        others = [_filled(reply.leaves, tensors) for reply, tensors in self.replies()]
        return SplitCall(
            self,
            self._num_calls,
            share=share,
            own=own,
            outputs=outputs,
            structure=structure,
            others=others,
            meets=request.meets,
        )

    def own_gradients(
        self,
        outputs: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        keeps_graph: bool,
        meets: bool,
    ) -> list[torch.Tensor | None]:
        """Return the gradients of rank zero's rows; see :func:`rankwise.tools.auto.own_call.gradients`."""
        try:
            found = gradients(outputs, given, inputs, keeps_graph=keeps_graph)
        except BaseException as error:
            self._own.end_together(error, meets=meets)
            self._note_interruption(error, meets=meets)
            raise
        self._own.end_together(None, meets=meets)
        return found

    def backward(self, message: Backward, tensors: Callable[[int], list[torch.Tensor]]) -> None:
        """Start the backward of a call on servers; ``tensors`` returns what goes to a rank."""
        self.prepare()
        for rank in range(1, self.exchange.world_size):
            self._send(rank, message, tensors(rank))
        self._is_in_step = True

    def replies(self) -> list[tuple[Any, list[torch.Tensor]]]:
        """Return what servers reply, by rank.

        Raises:
            ServerFailed: what was asked for has raised on a server.
        """
        replies = [self._receive(place) for place in range(len(self._connections))]
        for rank, (reply, _) in enumerate(replies, 1):
            if isinstance(reply, Failed):
                raise ServerFailed(rank, reply)
        return replies

    def are_there(self) -> bool:
        """Return whether they can be asked: not once the script was interrupted while a message was on its way.

        Raises:
            RankwiseError: the job has failed.
        """
        if self._is_in_step:
            if self.exchange.detector.error is not None:
                raise self.exchange.detector.error
        elif not self._has_given_up:
            self._has_given_up = True
            log("auto: calls run whole on one rank from here on: one was interrupted while ranks exchanged data")
            post_departure(self.exchange.detector.store, rank=0)  # for servers that wait in a collective
        return self._is_in_step

    def prepare(self) -> None:
        """Take in the replies to what has failed here or was interrupted, before something else is asked for."""
        for place, num in enumerate(self._num_pending):
            for _ in range(num):
                self._receive(place)
        self._is_in_step = False  # until all servers have been asked

    def is_final(self, error: BaseException) -> bool:
        """Return whether an error of a split call is the script's: whole, the call would not tell."""
        return self.exchange.detector.error is not None or is_interruption(error)

    def _note_interruption(self, error: BaseException, *, meets: bool) -> None:
        """Note that a call or backward has raised here: servers may wait for this rank in a collective."""
        self._is_in_step = self._is_in_step and not (meets and is_interruption(error))

    def forget(self, call: int) -> None:
        """Note that no backward of a call will follow. Called by garbage collection, at any moment."""
        self._forgotten.append(call)

    def _leave_to_parent(self) -> None:
        """Close what a forked process has of the connections: servers notice when its parent ends."""
        while self._connections:
            self._connections.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the end of the connection says all: servers have nothing to report.
        for connection in self._connections:
            if error is None and self._is_in_step:
                with suppress(ConnectionError):  # its launcher says what has become of it
                    connection.send(End())
            connection.close()

    def _send(self, rank: int, message: object, tensors: Sequence[torch.Tensor]) -> None:
        try:
            self._connections[rank - 1].send(message, tensors)
        except (ConnectionError, RankwiseError) as error:
            self._raise_loss(rank, error)
        self._num_pending[rank - 1] += 1

    def _receive(self, place: int) -> tuple[Any, list[torch.Tensor]]:
        try:
            self._connections[place].await_reply()
            self._is_in_step = False
            reply = self._connections[place].receive()
        except (ConnectionError, RankwiseError) as error:
            self._raise_loss(place + 1, error)
        self._num_pending[place] -= 1
        self._is_in_step = True
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
            self._is_in_step = True  # no call may run whole instead
            detector.refuse_all(known)
            raise


class SplitCall:
    """A call that has run on all ranks."""

    def __init__(
        self,
        servers: Servers,
        number: int,
        *,
        share: Share,
        own: OwnArguments,
        outputs: list[Any],
        structure: pytree.TreeSpec,
        others: list[list[Any]],
        meets: bool,
    ) -> None:
        self.outputs = outputs
        """Rank zero's, flat."""
        self.structure = structure
        self.servers = servers
        self._number = number
        self._share = share
        self._own = own
        self._others = others
        self._meets = meets
        self._is_freed = False
        if torch.is_grad_enabled():
            weakref.finalize(self, servers.forget, number).atexit = False

    def whole(self, rows: Sequence[OutputRows | None]) -> list[Any]:
        """Return the outputs of the whole batch, without a graph. Once: the rows of others are dropped.

        Raises:
            ResultChanged: the outputs do not have their rows there.
        """
        others, self._others = self._others, []
        for one in (self.outputs, *others):
            if len(one) != len(rows):
                raise ResultChanged(f"it returned {len(one)} values instead of {len(rows)}")
        made: list[Any] = []
        for number, (own, at) in enumerate(zip(self.outputs, rows, strict=True)):
            if self._first(number) < number:
                made.append(made[self._first(number)])
                continue
            if at is None:
                made.append(own.detach().clone() if isinstance(own, torch.Tensor) else own)
                continue
            parts = [own, *(one[number] for one in others)]
            for rank, part in enumerate(parts):
                num = self._share.of(rank).num
                if not isinstance(part, torch.Tensor) or at.fitting(part.shape, num) is None:
                    raise ResultChanged(f"it returned {list(getattr(part, 'shape', ()))} for {num} rows")
            made.append(joined([part.to(own.device) for part in parts], at, self._share))
        return made

    def with_graph(
        self,
        whole: list[Any],
        rows: Sequence[OutputRows | None],
        arguments: OwnArguments,
        parameters: Sequence[torch.Tensor],
        again: Callable[[str], list[Any]],
    ) -> list[Any]:
        """Return the outputs of the whole batch as results of one node of the graph.

        Args:
            whole: the outputs.
            rows: where the rows of each lie.
            arguments: of the whole batch.
            parameters: of the module, in an order that servers know.
            again: calls the module whole and returns its outputs, if gradients cannot be split for a reason.
        """
        places = [place for place, one in enumerate(self.outputs) if _has_graph(one) and self._first(place) == place]
        if not places:
            return whole
        used = [one for one in parameters if one.requires_grad]
        leaves = [one for one in [*arguments.whole, *(row for row, _ in arguments.rows)] if one.requires_grad]
        node = _Node(self, [whole[place] for place in places], places, rows, used, again)
        for place, one in zip(places, _Whole.apply(node, *used, *leaves), strict=True):
            whole[place] = one
        return [whole[self._first(place)] for place in range(len(whole))]

    def _first(self, number: int) -> int:
        """Return the number of the first output that is the same tensor."""
        own = self.outputs[number]
        return next((place for place, one in enumerate(self.outputs[:number]) if one is own), number)

    def refuse_twice(self) -> None:
        """Raise what torch raises if the graph has been freed."""
        if self._is_freed:
            raise RuntimeError(_TWICE)

    def gradients(
        self, given: dict[int, torch.Tensor], rows: Sequence[OutputRows | None], parameters: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the parameters and of the arguments that require one: first those without rows.

        Args:
            given: by the number of an output, its gradient for the whole batch.
            rows: where the rows of each output lie.
            parameters: that require a gradient.
        """
        if not self.servers.are_there():
            raise ResultChanged("an earlier call was interrupted")
        keeps = keeps_graph()
        self._is_freed = not keeps
        placed = {place: at for place in given if (at := rows[place]) is not None}
        adds = self.servers.add_together
        message = Backward(self._number, keeps, list(placed), self._meets or adds, adds)
        self.servers.backward(
            message, lambda rank: [part_of(given[place], at, self._share.of(rank)) for place, at in placed.items()]
        )
        shared = [*parameters, *(one for one in self._own.whole if one.requires_grad)]
        own_rows = [(one, dim) for one, dim in self._own.rows if one.requires_grad]
        own_given = [
            part_of(one, placed[place], self._share) if place in placed else one for place, one in given.items()
        ]
        with _hooks_off(parameters):
            found = self.servers.own_gradients(
                [self.outputs[place] for place in given],
                own_given,
                [*shared, *(one for one, _ in own_rows)],
                keeps_graph=keeps,
                meets=message.meets,
            )
        sums = added_together(found[: len(shared)], shared, self.servers.exchange) if adds else []
        others = [_filled(reply.leaves, tensors) for reply, tensors in self.servers.replies()]
        sums = sums or added([one[: len(shared)] for one in (found, *others)], own_given)
        parts = [[one[number] for one in (found, *others)] for number in range(len(shared), len(found))]
        joined_parts = [_joined_gradient(part, *one, self._share) for part, one in zip(parts, own_rows, strict=True)]
        if not keeps:
            self.outputs, self._own = [], OwnArguments((), (), self._own.tree)
        return [*sums, *joined_parts]


@dataclass(slots=True)
class _Node:
    """What the node of a split call knows."""

    call: SplitCall
    whole: list[torch.Tensor]
    """The outputs that have a graph; empty once the node has returned them."""
    places: Sequence[int]
    """Their numbers among all outputs."""
    rows: Sequence[OutputRows | None]
    """Of all outputs."""
    parameters: Sequence[torch.Tensor]
    again: Callable[[str], list[Any]]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, node: _Node, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.node = node
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        made, node.whole = node.whole, []
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        node: _Node = ctx.node
        reason = "gradients of its gradients are computed"
        if not torch.is_grad_enabled():
            by_place = {place: one for place, one in zip(node.places, given, strict=True) if one is not None}
            node.call.refuse_twice()
            try:
                return None, *node.call.gradients(by_place, node.rows, node.parameters)
            except Exception as error:
                if node.call.servers.is_final(error) or "modified by an inplace operation" in str(error):
                    raise  # in the second case plain Python raises it too
                reason = f"its backward fails for a part of the batch ({first_line(error)})"
        # An argument may be a parameter of the module: its gradient is returned once.
        inputs = {id(one): one for one in ctx.saved_tensors}
        with _hooks_off(node.parameters):
            outputs = node.again(reason)
            found = gradients(
                [outputs[place] for place in node.places],
                given,
                list(inputs.values()),
                keeps_graph=True,
                has_graph=torch.is_grad_enabled(),
            )
        by_id = dict(zip(inputs, found, strict=True))
        return None, *(by_id.pop(id(one), None) for one in ctx.saved_tensors)


def _rows_of(tensor: torch.Tensor, dim: int | None, share: Share) -> torch.Tensor:
    return tensor if dim is None else share.rows(tensor, dim)


def _sent(tensor: torch.Tensor) -> Rows:
    return Rows(tensor.requires_grad, tensor.device.type == "cpu")


def _filled(leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return flat values with tensors that came beside them in their places."""
    received = iter(tensors)
    return [next(received) if isinstance(one, Rows) else one for one in leaves]


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _has_graph(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _joined_gradient(
    parts: Sequence[torch.Tensor | None], like: torch.Tensor, dim: int, share: Share
) -> torch.Tensor | None:
    """Return the gradient of an argument from those of its rows, by rank."""
    if all(one is None for one in parts):
        return None
    shape = list(like.shape)
    filled: list[torch.Tensor] = []
    for rank, one in enumerate(parts):
        shape[dim] = share.of(rank).num
        filled.append(like.new_zeros(shape) if one is None else one.to(like.device))
    return joined(filled, OutputRows(SampleLayout(dim), memory_order(like.stride())), share)


@contextmanager
def _hooks_off(parameters: Sequence[torch.Tensor]) -> Generator[None]:
    """Have hooks of the script on parameters see nothing inside the block: these gradients are one rank's."""
    held = [(hooks, dict(hooks)) for one in parameters if (hooks := hooks_of_gradient(one))]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.update(before)
