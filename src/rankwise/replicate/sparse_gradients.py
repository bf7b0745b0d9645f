# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients of embeddings, reduced over ranks row by row: only rows that some rank has used are sent.

Owned by ``gradient_buckets``, which reduces the dense ones; the weights are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from rankwise.errors import ConfigurationError
from rankwise.replicate.loss.graph import is_zero, multiplied, ratio
from rankwise.torch_private.tensors import sparse_indices, sparse_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Amount, Exchange
    from rankwise.replicate.bucket import Weights

_ABSENT = -1
_DENSE = -2
"""Reported in place of a number of rows: no gradient, and one that is not sparse, as that of a tied weight."""


def sparse_layers(model: nn.Module) -> dict[int, str]:
    """Return the names of the layers whose weights have sparse gradients, by the identity of the weight."""
    return {
        id(layer.weight): name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }


def check_no_sparse(model: nn.Module, strategy: str) -> None:
    """Raise if a layer of ``model`` has sparse gradients, which torch cannot split over ranks."""
    name = next(iter(sparse_layers(model).values()), None)
    if name is not None:
        raise ConfigurationError(
            f"Parameter {name}{'.' * bool(name)}weight has a sparse gradient, and {strategy}() splits dense ones only.",
            do="create the layer with sparse=False, or call rankwise.replicate(model), which sends only the rows of "
            "sparse gradients",
        )


class SparseGradients:
    """The sparse gradients of some parameters of a model."""

    def __init__(self, parameters: Sequence[torch.Tensor], exchange: Exchange, what: str) -> None:
        """Follow these parameters, of which ranks may use different rows in a step.

        Args:
            parameters: [num_rows, ...], of the same shapes in the same order on every rank.
            exchange: the ranks.
            what: the name of the gradients, for errors.
        """
        self._parameters = parameters
        self._exchange = exchange
        self._what = what

    @torch.no_grad()
    def reduce(self, weights: Weights, total: Amount) -> None:
        """Make each gradient the weighted sum over ranks, coalesced; one that no rank has keeps ``grad=None``.

        Called by: every rank of the exchange, once per step.

        Args:
            weights: of this rank's gradients.
            total: the sum over ranks of what the gradients weigh.
        """
        own = [None if is_zero(weights.share) else parameter.grad for parameter in self._parameters]
        own = [one.coalesce() if one is not None and one.is_sparse else one for one in own]
        counts = [_num_rows(one, parameter) for one, parameter in zip(own, self._parameters, strict=True)]
        of_ranks = self._exchange.all_gather(torch.tensor(counts), what=f"{self._what}, numbers of rows").T.tolist()
        for parameter, gradient, numbers in zip(self._parameters, own, of_ranks, strict=True):
            if _DENSE in numbers:
                parameter.grad = self._sum(parameter, gradient, weights.share, total)
            elif max(numbers) != _ABSENT:
                parameter.grad = self._rows(parameter, gradient, numbers, weights.share, total)

    def _sum(
        self, parameter: torch.Tensor, gradient: torch.Tensor | None, share: Amount, total: Amount
    ) -> torch.Tensor:
        """Return the sum of gradients of which some are not sparse."""
        own = torch.zeros_like(parameter, dtype=_wide(parameter))
        if gradient is not None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            own.copy_(multiplied(dense.to(own.dtype), share))
        summed = self._exchange.all_reduce(own, what=f"{self._what}, sparse on some ranks")
        return multiplied(summed, ratio(1.0, total)).to(parameter.dtype)

    def _rows(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor | None,
        numbers: Sequence[int],
        share: Amount,
        total: Amount,
    ) -> torch.Tensor:
        """Return the sum of sparse gradients.

        Args:
            parameter: [num_rows, ...].
            gradient: of this rank.
            numbers: of its rows, on each rank; less than 0 where a rank has no gradient.
            share: of this rank's gradient.
            total: what all gradients weigh.
        """
        longest = max(numbers)
        rows = torch.zeros(longest, dtype=torch.int64, device=parameter.device)
        values = parameter.new_zeros(longest, *parameter.shape[1:], dtype=_wide(parameter))
        if gradient is not None:
            num_own = sparse_indices(gradient).shape[1]
            rows[:num_own] = sparse_indices(gradient)[0]
            values[:num_own] = multiplied(sparse_values(gradient).to(values.dtype), share)
        if longest:
            rows_of = self._exchange.all_gather(rows, what=f"{self._what}, numbers of sparse rows")
            values_of = self._exchange.all_gather(values, what=f"{self._what}, sparse rows")
            rows = torch.cat([one[: max(n, 0)] for one, n in zip(rows_of, numbers, strict=True)])
            values = torch.cat([one[: max(n, 0)] for one, n in zip(values_of, numbers, strict=True)])
        summed = _sparse(rows, values, parameter).coalesce()
        means = multiplied(sparse_values(summed), ratio(1.0, total)).to(parameter.dtype)
        return _sparse(sparse_indices(summed)[0], means, parameter, is_coalesced=True)


def _num_rows(gradient: torch.Tensor | None, parameter: torch.Tensor) -> int:
    if gradient is None:
        # One that does not count is not a gradient that no rank has.
        return _ABSENT if parameter.grad is None else _DENSE if not parameter.grad.is_sparse else 0
    return sparse_indices(gradient).shape[1] if gradient.is_sparse else _DENSE


def _wide(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype to sum in: half-precision numbers are rounded once."""
    return torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype


def _sparse(
    rows: torch.Tensor, values: torch.Tensor, parameter: torch.Tensor, *, is_coalesced: bool = False
) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        rows[None], values, parameter.shape, is_coalesced=is_coalesced, check_invariants=False
    )
