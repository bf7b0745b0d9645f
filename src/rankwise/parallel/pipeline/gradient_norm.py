# SPDX-License-Identifier: Apache-2.0
"""The norm of gradients of which each rank has a part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange


def clip_to_norm(
    parameters: Sequence[nn.Parameter], max_norm: float, exchange: Exchange | None, device: torch.device
) -> torch.Tensor:
    """Scale gradients down to a 2-norm of at most ``max_norm`` over all ranks, and return what it was.

    Called by: every rank of ``exchange``, each with parameters that no other has.

    Args:
        parameters: of this rank.
        max_norm: of all gradients together.
        exchange: the ranks; ``None`` for this one alone.
        device: of the parameters.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    own: Any = get_total_norm([cast("torch.Tensor", parameter.grad) for parameter in trained])
    if own_part(own) is not own:
        own = own.full_tensor()
    square = own.to(device, torch.float64).square()
    if exchange is not None:
        square = exchange.all_reduce(square, what="norm of the gradients")
    norm = square.sqrt().to(own.dtype)
    clip_grads_with_norm_(trained, max_norm, norm)
    return norm
