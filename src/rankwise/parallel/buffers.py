# SPDX-License-Identifier: Apache-2.0
"""Buffers that change while training, kept equal on all ranks: rank zero's count. Used by replicate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.collectives import all_gather_object
from rankwise.parallel.batchnorm import SYNCHRONISED
from rankwise.parallel.same_model import broadcast_tensors

if TYPE_CHECKING:
    from torch import nn

    from rankwise.exchange.torch_group import TorchGroup


class BufferSync:
    """Finds out in the first step which buffers change, and broadcasts those before each forward.

    Constant buffers (masks, position tables) cost nothing. The statistics of synchronised BatchNorm are
    equal on all ranks already.
    """

    def __init__(self, model: nn.Module, exchange: TorchGroup) -> None:
        self._exchange = exchange
        equal_already = {
            id(buffer)
            for module in model.modules()
            if isinstance(module, SYNCHRONISED)
            for buffer in module.buffers(recurse=False)
        }
        self._candidates = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in equal_already}
        self._versions: dict[str, int] | None = None
        self._moving: list[torch.Tensor] | None = None if self._candidates else []

    def before_forward(self) -> None:
        """Make the moving buffers equal. Called by: every rank, before each training forward."""
        if self._moving is None and self._versions is None:
            self._versions = {name: b._version for name, b in self._candidates.items()}  # noqa: SLF001
            return
        if self._moving is None:
            self._moving = self._find_moving()
        if self._moving:
            with torch.no_grad():
                broadcast_tensors(self._moving, self._exchange, what="buffers of rank 0")

    def _find_moving(self) -> list[torch.Tensor]:
        before = self._versions or {}
        changed = [name for name, b in self._candidates.items() if b._version != before[name]]  # noqa: SLF001
        on_any_rank = {name for names in all_gather_object(changed) for name in names}
        return [buffer for name, buffer in self._candidates.items() if name in on_any_rank]
