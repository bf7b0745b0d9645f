# SPDX-License-Identifier: Apache-2.0
"""The outputs of a split call as one node of the script's graph, and their gradients from all ranks."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankwise.auto.connection import Backward
from rankwise.auto.rows import OutputRows, OwnArguments, Share, added, added_together, gradients, joined, part_of
from rankwise.replicate.random_numbers.sample_layout import SampleLayout
from rankwise.replicate.random_numbers.scope import memory_order
from rankwise.torch_private.autograd import hooks_of_gradient, keeps_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rankwise.auto.replacing import HeldSignals
    from rankwise.auto.servers import Ran, Servers

_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)
"""As torch says it."""


class ResultChanged(Exception):
    """A split call has returned something else than its earlier ones."""


def whole_outputs(ran: Ran, rows: Sequence[OutputRows | None]) -> list[Any]:
    """Return the outputs of a call for the whole batch, without a graph. Once: the rows of others are dropped.

    Raises:
        ResultChanged: the outputs do not have their rows there.
    """
    others = ran.take_others()
    for one in (ran.outputs, *others):
        if len(one) != len(rows):
            raise ResultChanged(f"it returned {len(one)} values instead of {len(rows)}")
    made: list[Any] = []
    for number, (own, at) in enumerate(zip(ran.outputs, rows, strict=True)):
        first = _first(ran.outputs, number)
        if first < number:
            made.append(made[first])
        elif at is None:
            made.append(own.detach().clone() if isinstance(own, torch.Tensor) else own)
        else:
            parts = [own, *(one[number] for one in others)]
            for rank, part in enumerate(parts):
                num = ran.share.of(rank).num
                if not isinstance(part, torch.Tensor) or at.fitting(part.shape, num) is None:
                    raise ResultChanged(f"it returned {list(getattr(part, 'shape', ()))} for {num} rows")
            made.append(joined([part.to(own.device) for part in parts], at, ran.share))
    return made


def with_graph(
    ran: Ran,
    whole: list[Any],
    rows: Sequence[OutputRows | None],
    *,
    arguments: OwnArguments,
    parameters: Sequence[torch.Tensor],
    ways: Ways,
) -> list[Any]:
    """Return the outputs of a call for the whole batch as results of one node of the graph.

    Args:
        ran: the call.
        whole: the outputs.
        rows: where the rows of each lie.
        arguments: of the whole batch.
        parameters: of the module, in an order that servers know.
        ways: how gradients are computed.
    """
    places = [
        place
        for place, one in enumerate(ran.outputs)
        if isinstance(one, torch.Tensor) and one.requires_grad and _first(ran.outputs, place) == place
    ]
    if not places:
        ways.servers.forget(ran.number)
        return whole
    used = [one for one in parameters if one.requires_grad]
    leaves = [one for one in [*arguments.whole, *(row for row, _ in arguments.rows)] if one.requires_grad]
    node = _Node(ran, [whole[place] for place in places], places, rows, used, ways)
    ways.servers.forget_with(node, ran.number)
    for place, one in zip(places, _Whole.apply(node, *used, *leaves), strict=True):
        whole[place] = one
    return [whole[_first(ran.outputs, place)] for place in range(len(whole))]


@dataclass(frozen=True, slots=True)
class Ways:
    """How the gradients of a split call are computed."""

    servers: Servers
    again: Callable[[str], list[Any]]
    """Calls the module whole, and returns its outputs: where gradients cannot be split, for a reason."""
    signals: HeldSignals


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Node:
    """A split call of which gradients may be computed."""

    ran: Ran
    whole: list[torch.Tensor]
    """The outputs that have a graph; empty once the node has returned them."""
    places: Sequence[int]
    """Their numbers among all outputs."""
    rows: Sequence[OutputRows | None]
    """Of all outputs."""
    parameters: Sequence[torch.Tensor]
    ways: Ways
    is_freed: bool = False

    def gradients(self, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients of the parameters and of the arguments that require one: first those without rows.

        ``given`` are those of the outputs in ``places``.
        """
        ran, servers = self.ran, self.ways.servers
        by_place = {place: one for place, one in zip(self.places, given, strict=True) if one is not None}
        keeps = keeps_graph()
        self.is_freed = not keeps
        placed = {place: at for place in by_place if (at := self.rows[place]) is not None}
        adds = servers.add_together
        message = Backward(ran.number, keeps, list(placed), ran.meets or adds, adds)
        servers.backward(
            message, lambda rank: [part_of(by_place[place], at, ran.share.of(rank)) for place, at in placed.items()]
        )
        shared = [*self.parameters, *(one for one in ran.own.whole if one.requires_grad)]
        own_rows = [(one, dim) for one, dim in ran.own.rows if one.requires_grad]
        own_given = [
            part_of(one, placed[place], ran.share) if place in placed else one for place, one in by_place.items()
        ]
        with _hooks_off(self.parameters):
            found = servers.own.gradients(
                [ran.outputs[place] for place in by_place],
                own_given,
                [*shared, *(one for one, _ in own_rows)],
                keeps_graph=keeps,
                meets=message.meets,
            )
        sums = added_together(found[: len(shared)], shared, servers.exchange) if adds else []
        of_ranks = [found, *servers.replies()]
        sums = sums or added([one[: len(shared)] for one in of_ranks], own_given)
        parts = [[one[number] for one in of_ranks] for number in range(len(shared), len(found))]
        joined_parts = [_joined_gradient(part, *one, ran.share) for part, one in zip(parts, own_rows, strict=True)]
        if not keeps:
            ran.free()
        return [*sums, *joined_parts]

    def gradients_of_whole(
        self, given: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor], reason: str
    ) -> list[torch.Tensor | None]:
        """Return the same from a call that runs whole; ``inputs`` are the parameters and arguments."""
        # An argument may be a parameter of the module: its gradient is returned once.
        by_id = {id(one): one for one in inputs}
        with _hooks_off(self.parameters):
            outputs = self.ways.again(reason)
            found = gradients(
                [outputs[place] for place in self.places],
                given,
                list(by_id.values()),
                keeps_graph=True,
                has_graph=torch.is_grad_enabled(),
            )
        found_by_id = dict(zip(by_id, found, strict=True))
        return [found_by_id.pop(id(one), None) for one in inputs]


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
        with node.ways.signals:
            if torch.is_grad_enabled():
                reason = "gradients of its gradients are computed"
                return None, *node.gradients_of_whole(given, ctx.saved_tensors, reason)
            if node.is_freed:
                raise RuntimeError(_TWICE)
            try:
                return None, *node.gradients(given)
            except Exception as error:
                if node.ways.servers.have_failed or "modified by an inplace operation" in str(error):
                    raise  # in the second case plain Python raises it too
                reason = f"its backward fails for a part of the batch ({first_line(error)})"
            return None, *node.gradients_of_whole(given, ctx.saved_tensors, reason)


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _first(outputs: Sequence[Any], number: int) -> int:
    """Return the number of the first output that is the same tensor."""
    return next((place for place, one in enumerate(outputs[:number]) if one is outputs[number]), number)


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
