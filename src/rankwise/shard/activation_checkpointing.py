# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing in place: a block frees its activations, and computes them again in backward.

The block keeps its class, its keys and its hooks; only its ``forward`` is replaced. Used by shard.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rankwise.torch_private.modules import BatchNorm

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager


def recompute_block(block: nn.Module) -> None:
    """Have ``block`` keep only its inputs for backward. The same gradients, also with dropout and BatchNorm.

    A block that changes anything but BatchNorm's statistics when it runs (a cache of keys and values) cannot run twice.

    Source: torch.utils.checkpoint, without reentry (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
        2016).
    """
    if not isinstance(block.__dict__.get("forward"), _Recomputed):
        block.forward = _Recomputed(block)


class _Recomputed:
    """The replacement of a block's ``forward``."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._forward = block.forward

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # The second run restores the random state, and does not update the statistics again.
        forward = partial(self._forward, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _without_counting(self._block)


@contextmanager
def _without_counting(block: nn.Module) -> Generator[None]:
    """Have BatchNorm layers in training write their running statistics into copies."""
    layers = [m for m in block.modules() if isinstance(m, BatchNorm) and m.training and m.track_running_stats]
    kept = [dict(layer.named_buffers(recurse=False)) for layer in layers]
    for layer, buffers in zip(layers, kept, strict=True):
        for name, buffer in buffers.items():
            setattr(layer, name, buffer.clone())
    try:
        yield
    finally:
        for layer, buffers in zip(layers, kept, strict=True):
            for name, buffer in buffers.items():
                setattr(layer, name, buffer)
