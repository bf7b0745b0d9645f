# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch on one rank, the batch made whole again, and parameters that ranks use together; differentiable.

What the script sees is equal on every rank: whole inputs and outputs, and their gradients. Inside a split call a rank
has its rows only. Each operation here passes from one side to the other, and its gradient passes back:

    whole batch  --own_rows-->  rows of this rank  --whole_batch-->  whole batch
    parameters   --shared_by_ranks-->  parameters inside the call, whose gradients are added over ranks
    same on every rank inside the call  --once-->  the same outside, whose gradient enters the call on rank zero only

Source: the pairs of conjugate operators of Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankwise.data.shards import rank_slice
from rankwise.parallel.randomness.scope import memory_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Exchange


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one batch that a rank takes."""

    exchange: Exchange
    num_global: int
    """Rows of the batch, at least one per rank."""

    def rows_of(self, rank: int) -> tuple[int, int]:
        """Return the first row of a rank, and how many it has."""
        first, end = rank_slice(0, self.num_global, rank, self.exchange.world_size)
        return first, end - first

    @property
    def start(self) -> int:
        """The first row of this rank."""
        return self.rows_of(self.exchange.rank)[0]

    @property
    def num(self) -> int:
        """How many rows this rank has."""
        return self.rows_of(self.exchange.rank)[1]


def own_rows(whole: torch.Tensor, dim: int, share: Share) -> torch.Tensor:
    """Return this rank's rows along ``dim``; the gradient of ``whole`` is made of the rows of all ranks.

    Called by: every rank.
    """
    if whole.requires_grad and torch.is_grad_enabled():
        return _OwnRows.apply(whole, dim, share)  # type: ignore[no-any-return]
    return whole.narrow(dim, share.start, share.num)


def whole_batch(own: torch.Tensor, dim: int, share: Share, order: tuple[int, ...]) -> torch.Tensor:
    """Return the rows of all ranks along ``dim``; the gradient of ``own`` is this rank's rows of the whole one's.

    Called by: every rank.

    Args:
        own: this rank's rows.
        dim: of the rows.
        share: which rows these are.
        order: the dims in the order of memory, in which torch draws a tensor like the result.
    """
    if own.requires_grad and torch.is_grad_enabled():
        return _WholeBatch.apply(own, dim, share, order)  # type: ignore[no-any-return]
    return _gathered(own, dim, share, order)


def shared_by_ranks(parameters: Sequence[torch.Tensor], exchange: Exchange) -> list[torch.Tensor]:
    """Return parameters to compute this rank's rows with; their gradients are added over all ranks.

    Called by: every rank, and again in each backward.
    """
    return list(_SharedByRanks.apply(exchange, *parameters))


def once(same: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Return an output that does not depend on the rows; its gradient enters the call on one rank, not on each."""
    if same.requires_grad and torch.is_grad_enabled():
        return _Once.apply(same, exchange)  # type: ignore[no-any-return]
    return same


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, share: Share) -> torch.Tensor:
        ctx.dim, ctx.share, ctx.order = dim, share, memory_order(whole.stride())
        return whole.narrow(dim, share.start, share.num).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return _WholeBatch.apply(gradient, ctx.dim, ctx.share, ctx.order), None, None


class _WholeBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, dim: int, share: Share, order: tuple[int, ...]) -> torch.Tensor:
        ctx.dim, ctx.share = dim, share
        return _gathered(own, dim, share, order)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return _OwnRows.apply(gradient, ctx.dim, ctx.share), None, None, None


class _SharedByRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        ctx.likes = [(one.shape, one.dtype, one.device) for one in parameters]
        ctx.set_materialize_grads(False)
        return tuple(one.view_as(one) for one in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *_AddedOverRanks.apply(ctx.exchange, ctx.likes, *gradients)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, same: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return same.view_as(same)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return _OfRankZero.apply(gradient, ctx.exchange), None


class _OfRankZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return gradient.clone() if exchange.rank == 0 else torch.zeros_like(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        likes = [(gradient.shape, gradient.dtype, gradient.device)]
        return *_AddedOverRanks.apply(ctx.exchange, likes, gradient), None


class _AddedOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, likes: list[Any], *own: torch.Tensor | None) -> Any:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return _added(own, likes, exchange)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = [one for one in gradients if one is not None]
        passed = iter(_SharedByRanks.apply(ctx.exchange, *given) if given else ())
        return None, None, *(None if one is None else next(passed) for one in gradients)


def _gathered(own: torch.Tensor, dim: int, share: Share, order: tuple[int, ...]) -> torch.Tensor:
    """Return the rows of all ranks. Every rank sends as many as the one that has most: one more at most."""
    rows = own.detach().movedim(dim, 0)
    most = share.rows_of(0)[1]
    sent = rows.new_empty((most, *rows.shape[1:]))
    sent[: share.num] = rows
    sent[share.num :] = 0
    # Ranks may pad their rows to another length than the others.
    received = share.exchange.all_gather(sent, what=f"rows of a split call, each {list(rows.shape[1:])}")
    if share.num_global == most * share.exchange.world_size:
        whole = received.flatten(0, 1)
    else:
        parts = [received[rank, : share.rows_of(rank)[1]] for rank in range(share.exchange.world_size)]
        whole = torch.cat(parts)
    places = [order.index(one) for one in range(len(order))]
    return whole.movedim(0, dim).permute(order).contiguous().permute(places)


def _added(own: Sequence[torch.Tensor | None], likes: Sequence[Any], exchange: Exchange) -> tuple[Any, ...]:
    """Return the sums over ranks, ``None`` where no rank has a gradient: one message per dtype."""
    sums: list[torch.Tensor | None] = [None] * len(own)
    for kind in dict.fromkeys((dtype, device) for _, dtype, device in likes):
        places = [place for place, (_, dtype, device) in enumerate(likes) if (dtype, device) == kind]
        sizes = [likes[place][0].numel() for place in places]
        sent = torch.zeros(sum(sizes) + len(places), dtype=kind[0], device=kind[1])
        *parts, used = sent.split([*sizes, len(places)])
        for number, place in enumerate(places):
            gradient = own[place]
            if gradient is not None:
                parts[number].copy_(gradient.detach().reshape(-1))
                used[number] = 1
        received = exchange.all_reduce(sent, what="gradients of a split call")
        *parts, used = received.split([*sizes, len(places)])
        for place, part, is_used in zip(places, parts, used.tolist(), strict=True):
            if is_used:
                sums[place] = part.view(likes[place][0])
    return tuple(sums)
