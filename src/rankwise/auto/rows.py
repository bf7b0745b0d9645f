# SPDX-License-Identifier: Apache-2.0
"""Which rows of a batch a rank computes: of tensors, in a call of a module and its backward; and those of all as one.

On rank zero and on servers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rankwise import meter
from rankwise.comm.current_batch import CurrentBatch
from rankwise.data.shards import rank_slice
from rankwise.errors import CollectiveMismatch
from rankwise.replicate.random_numbers.model_draws import DrawsOfModel
from rankwise.torch_private.tensors import TreeSpec, foreach_add_, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rankwise.auto.coupling import CouplingWatch
    from rankwise.auto.module_calls import ModuleCalls
    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session
    from rankwise.replicate.random_numbers.sample_layout import SampleLayout


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one batch that a rank takes."""

    rank: int
    num_ranks: int
    num_global: int
    """Rows of the batch, at least one per rank."""

    @property
    def start(self) -> int:
        """The first row."""
        return rank_slice(0, self.num_global, self.rank, self.num_ranks)[0]

    @property
    def num(self) -> int:
        """How many rows."""
        first, end = rank_slice(0, self.num_global, self.rank, self.num_ranks)
        return end - first

    def of(self, rank: int) -> Share:
        """Return the share of another rank."""
        return Share(rank, self.num_ranks, self.num_global)

    def rows(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return these rows of a tensor."""
        return whole.narrow(dim, self.start, self.num)


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Where the rows lie in an output."""

    layout: SampleLayout
    """In the first batch: rows flattened with another dim, as in ``[batch * time, words]``, have its size."""
    order: tuple[int, ...]
    """The dims in the order of memory: numbers drawn like the output are drawn in this order."""

    def fitting(self, shape: Sequence[int], num: int) -> SampleLayout | None:
        """Return where ``num`` rows lie in an output of another batch, whose other dims may have other sizes."""
        layout = self.layout
        if len(shape) != len(self.order) or shape[layout.dim] % num:
            return None
        if layout.outer == 1 != layout.inner:
            layout = replace(layout, inner=shape[layout.dim] // num)
        elif layout.inner == 1 != layout.outer:
            layout = replace(layout, outer=shape[layout.dim] // num)
        return layout if layout.fits(shape, num) else None


def part_of(whole: torch.Tensor, rows: OutputRows, share: Share) -> torch.Tensor:
    """Return a rank's rows of an output, or of its gradient."""
    layout = rows.fitting(whole.shape, share.num_global) or rows.layout
    return layout.part(whole, share.num_global, share.start, share.num)


def joined(parts: Sequence[torch.Tensor], rows: OutputRows, share: Share) -> torch.Tensor:
    """Return the rows of all ranks as one new tensor.

    Args:
        parts: the rows, by rank.
        rows: where they lie in each part.
        share: of any rank.
    """
    dim = rows.layout.dim
    layouts = [rows.fitting(one.shape, share.of(rank).num) or rows.layout for rank, one in enumerate(parts)]
    shape = list(parts[0].shape)
    shape[dim] = layouts[0].outer * share.num_global * layouts[0].inner
    # Not a view of what cat() returns: autograd would forbid the script to change it in place.
    whole = torch.empty_permuted(shape, rows.order, dtype=parts[0].dtype, device=parts[0].device)
    unfolded = [
        one.detach().unflatten(dim, (at.outer, share.of(rank).num, at.inner))
        for rank, (one, at) in enumerate(zip(parts, layouts, strict=True))
    ]
    torch.cat(unfolded, dim + 1, out=whole.unflatten(dim, (layouts[0].outer, share.num_global, layouts[0].inner)))
    return whole


@dataclass(frozen=True, slots=True)
class OwnArguments:
    """The arguments of a call, flat: of tensors with rows, those of one rank."""

    leaves: Sequence[Any]
    dims: Sequence[int | None]
    """Per leaf, the dim of the rows."""
    tree: TreeSpec

    @property
    def rows(self) -> list[tuple[torch.Tensor, int]]:
        """The tensors with rows, and the dims of these."""
        return [(one, dim) for one, dim in zip(self.leaves, self.dims, strict=True) if dim is not None]

    @property
    def whole(self) -> list[torch.Tensor]:
        """The tensors that are the same for every row."""
        pairs = zip(self.leaves, self.dims, strict=True)
        return [one for one, dim in pairs if dim is None and isinstance(one, torch.Tensor)]


class OwnCalls:
    """Runs calls with this rank's rows."""

    def __init__(self, session: Session, exchange: Exchange, calls: ModuleCalls) -> None:
        self._session = session
        self._exchange = exchange
        self._calls = calls

    def new_draws(self, name: str) -> DrawsOfModel:
        """Return how calls of one kind draw their rows of the numbers that torch draws for the batch."""
        return DrawsOfModel(self._session, "torch", name)

    def run(
        self,
        module: nn.Module,
        draws: DrawsOfModel,
        share: Share,
        arguments: OwnArguments,
        *,
        meets: bool,
        watch: CouplingWatch | None = None,
    ) -> Any:
        """Call a module. Called by: every rank.

        Args:
            module: to call.
            draws: of this kind of calls.
            share: the rows.
            arguments: with these rows.
            meets: whether ranks exchange statistics within the call.
            watch: sees the call.
        """
        args, kwargs = tree_unflatten(list(arguments.leaves), arguments.tree)
        values = [one.movedim(dim, 0) for one, dim in arguments.rows]
        meter.current.resume(meter.current.part, samples=share.num)
        self._session.batches.begin_batch(CurrentBatch(0, 0, 0, share.num, share.num_global, share.start, values))
        draws.before(module, args, kwargs)
        try:
            result = self._calls.on_rows(module, args, kwargs, rows=arguments.rows, watch=watch)
        except BaseException as error:
            self.end_together(error, meets=meets)
            raise
        finally:
            draws.after(module)
            self._session.batches.finish_loop(0)
        self.end_together(None, meets=meets)
        return result

    def gradients(
        self,
        outputs: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor],
        *,
        keeps_graph: bool,
        meets: bool,
    ) -> list[torch.Tensor | None]:
        """Return the gradients of what a call was computed with; see :func:`gradients`. Called by: every rank."""
        try:
            found = gradients(outputs, given, inputs, keeps_graph=keeps_graph)
        except BaseException as error:
            self.end_together(error, meets=meets)
            raise
        self.end_together(None, meets=meets)
        return found

    def end_together(self, error: BaseException | None, *, meets: bool) -> None:
        """Free the ranks that wait for one whose call or backward has raised. Called by: every rank, at its end."""
        if not meets or isinstance(error, CollectiveMismatch):
            return
        what = "the end of a split call"
        if error is not None:
            with suppress(CollectiveMismatch):  # others wait in another collective
                self._exchange.gather_notes(b"raised", what)
        elif any(one.rstrip(b"\0") for one in self._exchange.gather_notes(b"", what)):
            raise CollectiveMismatch("The call has raised on another rank.")


def gradients(
    outputs: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    *,
    keeps_graph: bool,
    has_graph: bool = False,
) -> list[torch.Tensor | None]:
    """Return the gradients of inputs of a call.

    Args:
        outputs: of the call.
        given: their gradients; ``None``: it has none.
        inputs: the tensors that the call has computed with.
        keeps_graph: whether another backward may follow.
        has_graph: whether the gradients are to have a graph themselves.
    """
    used = [(one, g) for one, g in zip(outputs, given, strict=True) if g is not None and one.requires_grad]
    if not used or not inputs:
        return [None] * len(inputs)
    return list(
        torch.autograd.grad(
            [one for one, _ in used],
            list(inputs),
            [g for _, g in used],
            retain_graph=keeps_graph,
            create_graph=has_graph,
            allow_unused=True,
        )
    )


def added(
    by_rank: Sequence[Sequence[torch.Tensor | None]], others: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the sums of gradients over ranks; ``None`` where no rank has one.

    Args:
        by_rank: the gradients, those of rank zero first.
        others: tensors that the first gradients may share memory with.
    """
    sums = list(by_rank[0])
    held = {one.data_ptr() for one in others}
    for place, one in enumerate(sums):
        if one is None:
            first = next((of_rank[place] for of_rank in by_rank if of_rank[place] is not None), None)
            sums[place] = None if first is None else torch.zeros_like(first)
        elif one.data_ptr() in held or one.untyped_storage().nbytes() != one.nbytes:
            # Autograd may give two tensors one gradient, or one that is expanded.
            sums[place] = one.clone()
        held.update([] if one is None else [one.data_ptr()])
    for of_rank in by_rank[1:]:
        pairs = [(one, other) for one, other in zip(sums, of_rank, strict=True) if other is not None]
        into = [one for one, _ in pairs if one is not None]
        if into:
            foreach_add_(into, [other.to(one.device) for one, other in zip(into, (o for _, o in pairs), strict=True)])
    return sums


def added_together(
    own: Sequence[torch.Tensor | None], likes: Sequence[torch.Tensor], exchange: Exchange
) -> list[torch.Tensor | None]:
    """Return the sums of gradients over ranks; ``None`` where no rank has one. Called by: every rank.

    Args:
        own: the gradients of this rank.
        likes: tensors of the same shapes, dtypes and devices.
        exchange: adds them, with one message per dtype.
    """
    sums: list[torch.Tensor | None] = [None] * len(own)
    for kind in dict.fromkeys((one.dtype, one.device) for one in likes):
        places = [place for place, one in enumerate(likes) if (one.dtype, one.device) == kind]
        sizes = [likes[place].numel() for place in places]
        sent = torch.zeros(sum(sizes) + len(places), dtype=kind[0], device=kind[1])
        *parts, used = sent.split([*sizes, len(places)])
        for number, place in enumerate(places):
            gradient = own[place]
            if gradient is not None:
                parts[number].copy_(gradient.reshape(-1))
                used[number] = 1
        *parts, used = exchange.all_reduce(sent, what="gradients of a split call").split([*sizes, len(places)])
        for place, part, is_used in zip(places, parts, used.tolist(), strict=True):
            if is_used:
                sums[place] = part.view(likes[place].shape)
    return sums
