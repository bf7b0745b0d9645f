# SPDX-License-Identifier: Apache-2.0
"""Parameters in a split call: stand-ins whose gradients are added over ranks, so that the script's are complete."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise.tools.auto.proof import parameters_of
from rankwise.tools.auto.rows import shared_by_ranks
from rankwise.torch_private.modules import flat_weights, own_parameters

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from rankwise.comm.backends.protocol import Exchange


@contextmanager
def parameters_shared(
    module: nn.Module, whole: Sequence[torch.Tensor], exchange: Exchange
) -> Generator[dict[int, torch.Tensor]]:
    """Have a module compute with stand-ins for its parameters inside the block. Called by: every rank.

    Args:
        module: that is called.
        whole: arguments that are the same for every row.
        exchange: the ranks.

    Yields:
        The stand-ins, also of ``whole``, by the ``id`` of what they stand for.
    """
    used: list[torch.Tensor] = []
    if torch.is_grad_enabled():
        found = (one for one in (*parameters_of(module), *whole) if one.requires_grad)
        used = list({id(one): one for one in found}.values())
    if not used:
        yield {}
        return
    shared = dict(zip(map(id, used), shared_by_ranks(used, exchange), strict=True))
    places = [(table, key, one) for table, key, one in _places_of(module) if id(one) in shared]
    for table, key, one in places:
        table[key] = shared[id(one)]
    try:
        yield shared
    finally:
        for table, key, one in places:
            table[key] = one


def _places_of(module: nn.Module) -> list[tuple[Any, Any, torch.Tensor | None]]:
    """Return where modules hold parameters: a table, the key in it, and the parameter."""
    found: list[tuple[Any, Any, torch.Tensor | None]] = []
    for part in module.modules():
        table = own_parameters(part)
        found += [(table, name, one) for name, one in table.items()]
        if isinstance(part, nn.RNNBase):
            weights = flat_weights(part)
            found += [(weights, number, one) for number, one in enumerate(weights)]
    return found
