# SPDX-License-Identifier: Apache-2.0
"""An optimizer on several ranks: the options of its groups as JSON, and copies of its state from one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.collectives import gather_json
from rankwise.errors import ConfigurationError
from rankwise.replicate.same_model import broadcast_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange


Options = dict[str, Any]


def options_of(optimizer: torch.optim.Optimizer) -> list[Options]:
    """Return the options of every group.

    Raises:
        ConfigurationError: one is not a number, a text or a tuple of them.
    """
    return [
        {name: _plain(name, value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def set_options(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give every group the options that :func:`options_of` returned."""
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for name, value in options.items():
            now = group.get(name)
            if isinstance(now, torch.Tensor):
                now.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) and not isinstance(now, list) else value


def _plain(name: str, value: object) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(name, one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigurationError(
        f"The optimizer's option {name} is a {type(value).__name__}, which cannot be sent to a parameter server.",
        do="use an optimizer whose options are numbers, strings, or tuples of them",
    )


def copy_parameters_from(parameters: Sequence[nn.Parameter], source: int, exchange: Exchange) -> None:
    """Overwrite parameters with those of rank ``source``.

    Called by: every rank.
    """
    with torch.no_grad():
        tensors = [parameter.detach() for parameter in parameters]
        broadcast_tensors(tensors, exchange, what=f"parameters of rank {source}", source=source)


def copy_optimizer_state_from(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], source: int, exchange: Exchange
) -> None:
    """Overwrite the optimizer's state of ``parameters`` with that of rank ``source``.

    Called by: every rank.
    """
    own = [dict(optimizer.state.get(parameter, {})) for parameter in parameters]
    is_source = exchange.rank == source
    reported = gather_json(
        [_state_facts(state) for state in own] if is_source else None, what="optimizer state of a server"
    )
    tensors: list[torch.Tensor] = []
    for parameter, state, entries in zip(parameters, own, reported[source], strict=True):
        taken = {
            key: value if dtype is None else _tensor_like(state.get(key), parameter, dtype, shape, on_device=on_device)
            for key, value, dtype, shape, on_device in entries
        }
        if taken:
            optimizer.state[parameter] = state if is_source else taken
        keys = [key for key, _, dtype, _, _ in entries if dtype is not None]
        tensors += [dense(state[key]) if is_source else taken[key] for key in keys]
    with torch.no_grad():
        broadcast_tensors(tensors, exchange, what=f"optimizer state of rank {source}", source=source)


def _state_facts(state: dict[str, Any]) -> list[list[Any]]:
    """Return the state of one parameter as JSON: key, value, and dtype, shape and place of a tensor."""
    return [
        [key, None, str(value.dtype).removeprefix("torch."), list(value.shape), value.ndim > 0]
        if isinstance(value, torch.Tensor)
        else [key, value, None, None, False]
        for key, value in state.items()
    ]


def _tensor_like(
    now: object, parameter: nn.Parameter, dtype: str, shape: list[int], *, on_device: bool
) -> torch.Tensor:
    if isinstance(now, torch.Tensor) and list(now.shape) == shape:
        return now
    # Scalars, such as the number of steps, stay on the CPU.
    device = parameter.device if on_device else torch.device("cpu")
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def dense(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a dense one: the momentum of sparse gradients is sparse."""
    return value.to_dense() if value.is_sparse else value
