# SPDX-License-Identifier: Apache-2.0
"""Buffers of floating-point numbers, as BatchNorm's statistics, averaged over the worker groups."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

import torch

from rankwise.parallel.core.same_model import broadcast_tensors
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from torch import nn

    from rankwise.comm.backends.protocol import Exchange


class MeanBuffers:
    """The buffers of one model, for as long as it lives."""

    def __init__(self, model: nn.Module, across_groups: Exchange, data: Exchange | None) -> None:
        """Note whose they are.

        Args:
            model: any.
            across_groups: this rank, and that of its coordinate on each other worker group.
            data: the ranks of this worker group that see samples of their own; the first one's buffers count.
        """
        self._model = ref(model)
        self._across_groups = across_groups
        self._data = data

    @torch.no_grad()
    def average(self) -> None:
        """Replace each buffer by its mean over the worker groups. Called by: every rank."""
        model = self._model()
        if model is None:
            return
        parts = [own_part(buffer).detach() for buffer in model.buffers()]
        parts = [part for part in parts if part.is_floating_point() and not part.is_meta]
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for part in parts:
            by_kind.setdefault((part.dtype, part.device), []).append(part)
        for same in by_kind.values():
            mean = self._mean(torch.cat([part.reshape(-1) for part in same]))
            for part, piece in zip(same, mean.split([part.numel() for part in same]), strict=True):
                part.copy_(piece.view(part.shape))
        if self._data is not None:
            broadcast_tensors(parts, self._data, what="buffers of an island's first rank")

    def _mean(self, own: torch.Tensor) -> torch.Tensor:
        """Return the mean over the worker groups, which is what all have where that is the same."""
        # A sum of masks of the lowest number there is would be infinite, and one of constants would be rounded.
        first = self._across_groups.broadcast(own, 0, what="buffers of the first island")
        apart = torch.where(own == first, 0.0, own - first)
        total = self._across_groups.all_reduce(apart, what="buffers of all islands")
        return first + total / self._across_groups.world_size
