# SPDX-License-Identifier: Apache-2.0
"""Buffers that change while training, kept equal on all ranks: rank zero's count. Used by replicate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.parallel.batchnorm import SYNCHRONISED
from rankwise.parallel.same_model import broadcast_tensors

if TYPE_CHECKING:
    from torch import nn

    from rankwise.exchange.torch_group import TorchGroup

SMALL_BYTES = 2**18
"""Up to this size, sending all buffers takes no longer than asking which have changed."""


class BufferSync:
    """Gives every rank the buffers of rank zero before each training forward.

    Where they are large (masks, position tables), the ranks first agree on which have changed on any of them.
    The statistics of synchronised BatchNorm are equal on all ranks already.
    """

    def __init__(self, model: nn.Module, exchange: TorchGroup) -> None:
        self._model = model
        self._exchange = exchange
        self._seen = {name: (buffer, buffer._version) for name, buffer in self._buffers().items()}  # noqa: SLF001

    def before_forward(self) -> None:
        """Make the buffers equal. Called by: every rank, before each training forward."""
        buffers = self._buffers()
        if not buffers:
            return
        if sum(buffer.nbytes for buffer in buffers.values()) > SMALL_BYTES:
            buffers = self._changed_on_any_rank(buffers)
        with torch.no_grad():
            broadcast_tensors(buffers.values(), self._exchange, what="buffers of rank 0")
        self._seen |= {name: (buffer, buffer._version) for name, buffer in buffers.items()}  # noqa: SLF001

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"{place}.{name}": buffer
            for place, module in self._model.named_modules()
            if not isinstance(module, SYNCHRONISED)
            for name, buffer in module.named_buffers(recurse=False)
        }

    def _changed_on_any_rank(self, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        changed = torch.tensor([self._has_changed(name, buffer) for name, buffer in buffers.items()]).byte()
        self._exchange.all_reduce_(changed, "max", what="buffers that changed").wait()
        return {name: buffers[name] for name, moved in zip(buffers, changed.tolist(), strict=True) if moved}

    def _has_changed(self, name: str, buffer: torch.Tensor) -> bool:
        before = self._seen.get(name)
        return before is None or before[0] is not buffer or before[1] != buffer._version  # noqa: SLF001
