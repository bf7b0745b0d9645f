# SPDX-License-Identifier: Apache-2.0
"""``no_sync`` and ``weight``: what a script declares around ``backward()``, for every strategy alike."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from rankwise.replicate.loss.amounts import amount_of
from rankwise.replicate.strategy_registry import registered_strategy

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch
    from torch import nn


@contextmanager
def no_sync(*models: nn.Module) -> Generator[None]:
    """Add gradients up on this rank only; the first backward outside the block makes them exact.

    Called by: every rank. For accumulation: all microsteps but the last one inside the block, the last one
    outside. The gradients are then the mean over all samples of all microsteps of all ranks, so do not divide
    the loss by the number of microsteps; they may be unequal in size and number. A sharded model keeps whole
    gradients on each rank meanwhile, and clearing gradients does not forget microsteps.

    Args:
        models: replicated or sharded models.

    Raises:
        ConfigurationError: a model is neither.
    """
    found = [registered_strategy(model, "no_sync") for model in models]
    with ExitStack() as undo:
        for one in found:
            undo.callback(one.set_accumulating, one.set_accumulating(True))
        yield


@contextmanager
def weight(model: nn.Module, amount: float | torch.Tensor) -> Generator[None]:
    """Declare what the loss of the backward inside the block is a mean over, on this rank.

    Called by: every rank, each with its own amount, around ``loss.backward()``.

    For a loss that is a mean over tokens: ``with rankwise.weight(model, num_tokens): loss.backward()``. The
    gradients are then means over all tokens of all ranks, however many each rank has.

    Args:
        model: a replicated or sharded model.
        amount: number of tokens or samples on this rank, at least zero.

    Raises:
        ConfigurationError: the model is neither, or the amount is negative or not finite.
    """
    found = registered_strategy(model, "weight")
    before = found.set_given_weight(amount_of(amount))
    try:
        yield
    finally:
        found.set_given_weight(before)
