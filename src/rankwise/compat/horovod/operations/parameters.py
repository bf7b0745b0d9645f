# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a Horovod script start from: parameters and optimizer state of one rank, given to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankwise.compat.horovod.initialization import rank
from rankwise.compat.horovod.operations.api import synchronize
from rankwise.compat.horovod.operations.broadcasting import broadcast_async_
from rankwise.compat.horovod.operations.objects import broadcast_object
from rankwise.compat.horovod.optimizer.wrapped_optimizer import WrappedOptimizer
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]], root_rank: int
) -> None:
    """Overwrite tensors, in place, with those of ``root_rank``.

    Called by: every rank, with tensors of the same names, shapes and dtypes.

    Args:
        params: ``model.state_dict()``, or tensors, or pairs of name and tensor, as ``model.named_parameters()``.
        root_rank: the rank whose tensors all receive.

    Raises:
        ConfigurationError: ``params`` is something else; it is a ``ValueError``.
    """
    if isinstance(params, dict):
        pairs: list[Any] = sorted(params.items())
    elif isinstance(params, str | torch.Tensor) or not hasattr(params, "__iter__"):
        raise ConfigurationError(
            f"broadcast_parameters takes a dict or a list of parameters, not {type(params).__name__}.",
            do="pass model.state_dict(), or model.named_parameters()",
        )
    else:
        pairs = [one if isinstance(one, tuple) else (None, one) for one in params]
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(
                f"broadcast_parameters takes tensors; {name!r} is {type(tensor).__name__}.",
                do="omit it here, and pass it to broadcast_object()",
            )
    # Detached, it is still the parameter's memory, and may be written.
    targets = [tensor.detach() for _, tensor in pairs]
    sent = [target.contiguous() for target in targets]
    handles = [broadcast_async_(one, root_rank, name) for one, (name, _) in zip(sent, pairs, strict=True)]
    for target, one, handle in zip(targets, sent, handles, strict=True):
        synchronize(handle)
        if one is not target:
            target.copy_(one)


@dataclass(frozen=True, slots=True)
class _TensorFacts:
    """What another rank has to know of a tensor to make room for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_device: bool
    """Whether it is where the parameter is, rather than on the CPU."""


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Give every rank the state and the options of the optimizer of ``root_rank``.

    Called by: every rank, with an optimizer of the same class and parameters.

    Nothing is computed for it: an optimizer that has not stepped yet is as new on every rank afterwards, and state that
    only ``root_rank`` has is made on the others. What is no tensor keeps its type.

    Args:
        optimizer: of ``torch.optim``, or one that ``DistributedOptimizer`` has wrapped.
        root_rank: the rank whose state all receive.
        model: not needed.

    Raises:
        ConfigurationError: ``optimizer`` is ``torch.optim.LBFGS``, whose state is one of lists; it is a ``ValueError``.
    """
    del model
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "The state of torch.optim.LBFGS cannot be broadcast.",
            do="optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), root_rank))",
        )
    if isinstance(optimizer, WrappedOptimizer):
        optimizer.forget_gradients()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    described = [
        {key: _described(value, parameter) for key, value in optimizer.state[parameter].items()}
        if parameter in optimizer.state
        else None
        for parameter in parameters
    ]
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    is_root = rank() == root_rank
    described, options, num_parameters = broadcast_object(
        (described, options, len(parameters)), root_rank, "optimizer_state"
    )
    if num_parameters != len(parameters):
        raise ConfigurationError(
            "The optimizers of the ranks have different numbers of parameters.",
            evidence=f"rank {root_rank}: {num_parameters}, rank {rank()}: {len(parameters)}",
            do="create the optimizer with the same parameters on every rank",
        )
    if not is_root:
        for group, values in zip(optimizer.param_groups, options, strict=True):
            group.update(values)
    tensors: list[torch.Tensor | tuple[str, torch.Tensor]] = []
    for number, (parameter, entries) in enumerate(zip(parameters, described, strict=True)):
        if entries is None:
            optimizer.state.pop(parameter, None)
            continue
        own = optimizer.state[parameter]
        state = {key: _room(own.get(key), value, parameter) for key, value in entries.items()}
        tensors += [
            (f"{number}.{key}", state[key]) for key, value in entries.items() if isinstance(value, _TensorFacts)
        ]
        optimizer.state[parameter] = state
    broadcast_parameters(tensors, root_rank)


def _described(value: object, parameter: torch.Tensor) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return _TensorFacts(
        tuple(value.shape), value.dtype, value.device == parameter.device and value.device.type != "cpu"
    )


def _room(own: object, described: object, parameter: torch.Tensor) -> Any:  # noqa: ANN401 - a tensor, or any value
    """Return what this rank has of what is described, or memory to receive it."""
    if not isinstance(described, _TensorFacts):
        return described
    if isinstance(own, torch.Tensor) and own.shape == described.shape and own.dtype == described.dtype:
        return own
    device = parameter.device if described.is_on_device else torch.device("cpu")
    return torch.empty(described.shape, dtype=described.dtype, device=device)
