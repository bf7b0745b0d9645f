# SPDX-License-Identifier: Apache-2.0
"""Giving all ranks what one server keeps: parameters, and the optimizer's state of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.collectives import gather_json
from rankwise.parallel.same_model import broadcast_tensors
from rankwise.parallel.server.layout import dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rankwise.exchange.protocol import Exchange


def give_parameters(parameters: Sequence[nn.Parameter], source: int, exchange: Exchange) -> None:
    """Overwrite parameters with those of rank ``source``.

    Called by: every rank.
    """
    with torch.no_grad():
        tensors = [parameter.detach() for parameter in parameters]
        broadcast_tensors(tensors, exchange, what=f"parameters of rank {source}", source=source)


def give_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], source: int, exchange: Exchange
) -> None:
    """Overwrite the optimizer's state of ``parameters`` with that of rank ``source``.

    Called by: every rank.
    """
    own = [dict(optimizer.state.get(parameter, {})) for parameter in parameters]
    is_source = exchange.rank == source
    told = gather_json([_told(state) for state in own] if is_source else None, what="optimizer state of a server")
    tensors: list[torch.Tensor] = []
    for parameter, state, entries in zip(parameters, own, told[source], strict=True):
        taken = {
            key: value if dtype is None else _place_for(state.get(key), parameter, dtype, shape, on_device=on_device)
            for key, value, dtype, shape, on_device in entries
        }
        if taken:
            optimizer.state[parameter] = state if is_source else taken
        keys = [key for key, _, dtype, _, _ in entries if dtype is not None]
        tensors += [dense(state[key]) if is_source else taken[key] for key in keys]
    with torch.no_grad():
        broadcast_tensors(tensors, exchange, what=f"optimizer state of rank {source}", source=source)


def _told(state: dict[str, Any]) -> list[list[Any]]:
    """Return the state of one parameter as JSON: key, value, and dtype, shape and place of a tensor."""
    return [
        [key, None, str(value.dtype).removeprefix("torch."), list(value.shape), value.ndim > 0]
        if isinstance(value, torch.Tensor)
        else [key, value, None, None, False]
        for key, value in state.items()
    ]


def _place_for(now: object, parameter: nn.Parameter, dtype: str, shape: list[int], *, on_device: bool) -> torch.Tensor:
    if isinstance(now, torch.Tensor) and list(now.shape) == shape:
        return now
    # A number, such as how many steps there were, stays on the CPU.
    device = parameter.device if on_device else torch.device("cpu")
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
