# SPDX-License-Identifier: Apache-2.0
"""Flat memory in which many gradients travel as one.

Plans which parameters share a bucket and lays them out; knows no ranks. Used by gradient_sync.
Legend: P parameters of a bucket, n elements of all of them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

MEBIBYTE_BYTES = 2**20
COARSE_BYTES = 2**16
"""Mean size of a gradient from which on memory costs more than calls."""
_WEIGHT_DTYPES = (torch.float32, torch.float64)


def plan(
    parameters: Sequence[nn.Parameter], order: Sequence[int], first_bytes: int, limit_bytes: int
) -> list[list[int]]:
    """Return buckets of parameter numbers, filled in ``order``.

    Parameters of one dtype and device share buckets. A bucket closes when it reaches its limit; the first
    closes early, so that reducing starts early.

    Args:
        parameters: all of them.
        order: their numbers, in the order their gradients arrive.
        first_bytes: limit of the first bucket of each kind.
        limit_bytes: limit of the others.
    """
    closed: list[list[int]] = []
    open_of: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    limit_of: dict[tuple[torch.dtype, torch.device], int] = {}
    for number in order:
        parameter = parameters[number]
        kind = (parameter.dtype, parameter.device)
        members, size_bytes = open_of.get(kind, ([], 0))
        members.append(number)
        size_bytes += parameter.numel() * parameter.element_size()
        if size_bytes >= limit_of.get(kind, first_bytes):
            closed.append(members)
            limit_of[kind] = limit_bytes
            members, size_bytes = [], 0
        open_of[kind] = (members, size_bytes)
    return closed + [members for members, _ in open_of.values() if members]


class Bucket:
    """Gradients that are reduced together: a flat tensor [n + P + 1] and views into it.

    After the n gradient elements come a flag per parameter (does this rank have a gradient for it) and the
    weight of this rank's share of the step; summed over ranks they say who used what, and divide the sum.
    """

    def __init__(self, numbers: Sequence[int], parameters: Sequence[nn.Parameter]) -> None:
        self.numbers = list(numbers)
        self.parameters = [parameters[number] for number in numbers]
        example = self.parameters[0] if self.parameters else None
        num_elements = sum(parameter.numel() for parameter in self.parameters)
        self.flat = torch.zeros(
            num_elements + len(self.parameters) + 1,
            dtype=torch.float64 if example is None else example.dtype,
            device=None if example is None else example.device,
        )
        self.body = self.flat[:num_elements]
        self.flags = self.flat[num_elements:-1]
        self.weight = self.flat[-1:]
        self.views = _views(self.body, self.parameters)
        self._is_coarse = self.body.nbytes >= COARSE_BYTES * max(len(self.parameters), 1)
        self.num_missing = len(self.parameters)

    @property
    def carries_weight(self) -> bool:
        """Whether the dtype holds a sum of weights well enough."""
        return self.flat.dtype in _WEIGHT_DTYPES

    @torch.no_grad()
    def fill(self, factor: float, weight: float) -> None:
        """Copy the gradients in, times ``factor``, with the flags and the weight behind them.

        A parameter without a gradient counts as zero. With factor 0 nothing of the gradients gets in, not
        even a NaN.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        absent = [index for index, gradient in enumerate(gradients) if gradient is None]
        self.weight.fill_(weight)
        if factor == 0.0:
            self.body.zero_()
        else:
            for index in absent:
                self.views[index].zero_()
            self._take(gradients, factor)
        self.flags.fill_(1.0)
        for index in absent:
            self.flags[index] = 0.0

    def _take(self, gradients: Sequence[torch.Tensor | None], factor: float) -> None:
        pairs = [(view, grad) for view, grad in zip(self.views, gradients, strict=True) if grad is not None]
        if self._is_coarse:
            # One pass over memory, at the price of a call per gradient.
            for view, gradient in pairs:
                torch.mul(gradient, factor, out=view)
            return
        moved = [(view, gradient) for view, gradient in pairs if gradient is not view]
        if moved:
            torch._foreach_copy_([view for view, _ in moved], [gradient for _, gradient in moved])
        if factor != 1.0:
            self.body.mul_(factor)

    @torch.no_grad()
    def hand_back(self, scale: float) -> None:
        """Scale the sum and make each parameter's gradient a view of it.

        A parameter that no rank had a gradient for keeps ``grad=None``.
        """
        if scale != 1.0:
            self.body.mul_(scale)
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            # The flag is only read where this rank had nothing itself: reading one element is slow.
            if parameter.grad is not None or self.flags[index].item():
                parameter.grad = view
        self.num_missing = len(self.parameters)


def _views(body: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return a view of ``body`` per parameter, in the parameter's own memory format."""
    views = []
    offset = 0
    for parameter in parameters:
        piece = body[offset : offset + parameter.numel()]
        offset += parameter.numel()
        # empty_like gives the strides autograd uses: the parameter's own where they leave no holes.
        strides = torch.empty_like(parameter, device="meta").stride()
        views.append(piece.as_strided(parameter.size(), strides, piece.storage_offset()))
    return views
