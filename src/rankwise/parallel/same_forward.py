# SPDX-License-Identifier: Apache-2.0
"""Ranks that calculate a forward together must all be in it: one that runs one more would mix into another's.

Used by tensor_parallel and shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.torch_private import tree as pytree

if TYPE_CHECKING:
    from torch import nn

    from rankwise.exchange.protocol import Exchange


class SameForward:
    """The calls of one model, counted. They are compared before anything of the model is sent."""

    def __init__(self, exchange: Exchange | None, name: str) -> None:
        """Count from here.

        Args:
            exchange: of the ranks that share the model.
            name: of it, in words: ``"sharded Net"``.
        """
        self._exchange = exchange
        self._name = name
        self._count = 0

    def meet(self, model: nn.Module, inputs: object = None) -> None:
        """Wait for every rank to come to this forward.

        Called by: every rank that shares the model.

        Args:
            model: that is called.
            inputs: what it is called with, where that must have the same shapes on every rank.

        Raises:
            CollectiveMismatch: another rank is in another forward, or elsewhere.
        """
        if self._exchange is None:
            return
        self._count += 1
        said = [f"forward {self._count} of a {self._name}"]
        said.append(f"{'with' if torch.is_grad_enabled() else 'without'} gradients")
        if inputs is not None:
            said.append("in training" if model.training else "in evaluation")
            said += [_kind(one) for one in pytree.tree_leaves(inputs) if isinstance(one, torch.Tensor)]
        self._exchange.meet(", ".join(said))


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
