# SPDX-License-Identifier: Apache-2.0
"""Objects, parameters and optimizer state of one rank, given to all. Horovod's module of this name."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from rankwise.comm.collectives.objects import SignedCall
from rankwise.compat.horovod.api import synchronize
from rankwise.compat.horovod.collectives import allgather, broadcast, broadcast_async_
from rankwise.compat.horovod.distributed_optimizer import WrappedOptimizer
from rankwise.compat.horovod.initialization import rank
from rankwise.compat.horovod.process_sets import ProcessSet, global_process_set, members_of
from rankwise.compat.horovod.queue import current_queue
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

T = TypeVar("T")


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Return the object of ``root_rank``.

    Called by: every rank of the process set. Objects are pickled, and signed: what a rank of this job has not signed
    is not unpickled.

    Args:
        obj: used on ``root_rank`` only, which gets this very object back.
        root_rank: a rank of the world.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.
    """
    what = name or "broadcast_object"
    is_root = rank() == root_rank
    call = _signed_call(what, process_set)
    payload = _bytes(obj, call) if is_root else torch.empty(0, dtype=torch.uint8)
    num_bytes = int(broadcast(torch.tensor([payload.numel()]), root_rank, f"{what}.sz", process_set=process_set))
    if not is_root:
        payload = torch.empty(num_bytes, dtype=torch.uint8)
    received = broadcast(payload, root_rank, f"{what}.t", process_set=process_set)
    loaded = obj if is_root else call.load(received.numpy().tobytes(), root_rank)
    call.end()
    return loaded


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Return the objects of all ranks, in rank order.

    Called by: every rank of the process set. Objects are pickled, and signed: what a rank of this job has not signed
    is not unpickled.

    Args:
        obj: of this rank; objects may differ in type and size.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.
    """
    what = name or "allgather_object"
    call = _signed_call(what, process_set)
    payload = _bytes(obj, call)
    sizes = allgather(torch.tensor([payload.numel()]), name=f"{what}.sz", process_set=process_set)
    rows = allgather(payload, name=f"{what}.t", process_set=process_set)
    parts = zip(rows.split(sizes.tolist()), _ranks_of(process_set), strict=True)
    objects = [call.load(part.numpy().tobytes(), sender) for part, sender in parts]
    call.end()
    return objects


def _signed_call(what: str, process_set: ProcessSet) -> SignedCall:
    return SignedCall(f"hvd: {what}", _ranks_of(process_set))


def _ranks_of(process_set: ProcessSet) -> Sequence[int]:
    return current_queue().members[members_of(process_set)].ranks


def _bytes(obj: object, call: SignedCall) -> torch.Tensor:
    signed = call.sign(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
    return torch.frombuffer(bytearray(signed), dtype=torch.uint8)


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


class _TensorFacts(NamedTuple):
    """The facts of a tensor by which another rank allocates memory for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_device: bool
    """Whether it is on the parameter's device, rather than on the CPU."""


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Give every rank the state and the options of the optimizer of ``root_rank``.

    Called by: every rank, with an optimizer of the same class and parameters.

    It takes no step: if the optimizer of ``root_rank`` has no state yet, none has any afterwards, and state that only
    ``root_rank`` has is created on the others. Values that are not tensors keep their type.

    Args:
        optimizer: of ``torch.optim``, or one that ``DistributedOptimizer`` has wrapped.
        root_rank: the rank whose state all receive.
        model: not used.

    Raises:
        ConfigurationError: ``optimizer`` is ``torch.optim.LBFGS``, whose state holds lists; it is a ``ValueError``.
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


def _room(own: object, described: object, parameter: torch.Tensor) -> Any:
    """Return this rank's value for a described one: the value itself, its own tensor, or memory for a tensor."""
    if not isinstance(described, _TensorFacts):
        return described
    if isinstance(own, torch.Tensor) and own.shape == described.shape and own.dtype == described.dtype:
        return own
    device = parameter.device if described.is_on_device else torch.device("cpu")
    return torch.empty(described.shape, dtype=described.dtype, device=device)
