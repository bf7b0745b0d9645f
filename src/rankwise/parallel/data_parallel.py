# SPDX-License-Identifier: Apache-2.0
"""Data parallel over several devices of one process, by threads: like torch's nn.DataParallel, but in place.

For scripts that must remain one process. Holds the public call and the replacement of forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from itertools import pairwise
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import ref

import torch

from rankwise.comm.session import current_or_none
from rankwise.errors import ConfigurationError, RankwiseError
from rankwise.log import log, warn
from rankwise.parallel.core.strategy_registry import is_placed
from rankwise.parallel.loss.terms import first_tensor
from rankwise.torch_private import tree as pytree
from rankwise.torch_private.modules import aliases, own_buffers, own_parameters
from rankwise.world.device import accelerator
from rankwise.world.device.kinds import is_accelerator, kind_named
from rankwise.world.device.streams import on_stream, stream_of_thread
from rankwise.world.environments.process import read_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

PLAIN = (str, bytes, bool, int, float, complex, type(None), Enum, torch.dtype, torch.device, torch.Size)
"""Types that an output may hold beside tensors, if the values are the same for every part."""

M = TypeVar("M", bound="nn.Module")

COST = (
    "data_parallel copies the model to every device in each step, collects all outputs on {first}, and "
    "its threads share Python's lock; rankwise.replicate, started with `rankwise run`, avoids all of "
    "this and computes the same gradients"
)


def data_parallel(model: M, devices: Sequence[str | torch.device | int] | None = None) -> M:
    """Have ``model(...)`` split its batch over several devices of this process, in place.

    Called by: the one process of a script that has no ranks; before or after the optimizer is built.

    Each call splits the batch as evenly as possible, runs the parts at the same time, each in a thread, and
    concatenates the outputs on the first device. The gradients are those of one device. The model keeps its class and
    its ``state_dict`` keys; a deepcopy or pickle of it is a plain model.

    :func:`rankwise.replicate` with one process per device is faster: here the model is copied to every device in each
    step, and Python runs for one device at a time.

    Samples are the first dimension of the first tensor argument. Every tensor argument with that many rows is split;
    anything else is passed to every device whole. An output without dimensions counts as a mean over the samples and is
    averaged with the parts' sizes. Exceptions from the result of one device: BatchNorm takes its statistics per part,
    and keeps those of the first; dropout draws for each part; values that forward stores on the module are lost, except
    on the first device.

    Args:
        model: on the first device already.
        devices: of one kind, the first one the model's own; ``["cpu", "cpu"]`` is for trying it out. By default
            every GPU that this process sees, starting with the model's own; only the model's own device if that is
            no GPU.

    Returns:
        ``model`` itself. With one device it is not changed, which the log says.

    Raises:
        ConfigurationError: there are several ranks, joined or not; the model is no module, not on the first device,
            placed, or its forward was replaced before; or devices are of different kinds.

    Source: torch.nn.DataParallel.
    """
    _check_is_alone()
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(
            f"data_parallel() takes a torch.nn.Module, not a {type(model).__name__}.",
            do="pass the model itself: data_parallel(model, devices=[...])",
        )
    if is_placed(model):
        raise ConfigurationError(
            "data_parallel() cannot be combined with place(), which was already applied to this model: its "
            "weights are on one device at a time, and the parts of a batch would compete for them.",
            do="omit data_parallel(); rankwise.replicate(model) supports placed models",
        )
    places = _devices(model, devices)
    own = MethodType(type(model).forward, model)  # which a copy of a model has in itself
    if vars(model).get("forward", own) != own:
        raise ConfigurationError(
            f"The forward of this {type(model).__name__} was already replaced: by data_parallel(), by "
            "torch.compile, or by the script.",
            do="call data_parallel() once, with the model itself; compile it afterwards",
        )
    if len(places) == 1:
        log(f"data_parallel: only one device, {places[0]}; the model runs there unchanged")
        return model
    warn(COST.format(first=places[0]))
    vars(model)["forward"] = _Spread(model, places)
    return model


def _check_is_alone() -> None:
    """Raise if this process is one of several ranks: each would train its own model, on the devices of all."""
    session = current_or_none()
    if session is not None:
        num_ranks, where, evidence = session.world.world_size, str(session.world), None
    else:
        try:
            reading = read_process()
        except RankwiseError:
            return  # join() refuses variables that fit no launcher, and this script does not join.
        num_ranks, where, evidence = reading.world_size, None, reading.reason
    if num_ranks > 1:
        raise ConfigurationError(
            f"data_parallel() requires a single process, but this is one of {num_ranks} ranks.",
            where=where,
            evidence=evidence,
            do="use rankwise.replicate(model) after rankwise.join(): each rank has a device of its own",
        )


def _devices(model: nn.Module, wanted: Sequence[str | torch.device | int] | None) -> list[torch.device]:
    tensors = [*model.parameters(), *model.buffers()]
    own = tensors[0].device if tensors else torch.device("cpu")
    if wanted is None:
        others = range(accelerator.count_of(own.type))
        return [own, *(torch.device(own.type, number) for number in others if number != own.index)]
    if isinstance(wanted, str | torch.device) or not isinstance(wanted, Iterable):
        raise ConfigurationError(
            f"devices of data_parallel() must be a list, got {wanted!r}.",
            do=f"pass devices={accelerator.example_list()}, or omit it to use every {accelerator.shown_kind().title}",
        )
    places = [_device(one) for one in wanted]
    if not places or len({place.type for place in places}) > 1:
        raise ConfigurationError(
            "data_parallel() requires devices of one type.",
            evidence=f"devices={[str(place) for place in places]}",
            do=f"pass devices={accelerator.example_list()}, or omit it to use every {accelerator.shown_kind().title}",
        )
    for tensor in tensors:
        if tensor.device != places[0]:
            raise ConfigurationError(
                f"The model is on {tensor.device}, but the first device of data_parallel() is {places[0]}.",
                do=f"move it first: model.to({str(places[0])!r})",
            )
    return places


def _device(name: str | torch.device | int) -> torch.device:
    try:
        place = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"data_parallel() got an unknown device {name!r}.",
            evidence=str(error).splitlines()[0],
            do=f"pass names of torch devices: devices={accelerator.example_list()}",
        ) from None
    if is_accelerator(place.type):
        kind = kind_named(place.type)
        count = accelerator.count_of(place.type)
        place = torch.device(place.type, place.index or 0)
        if place.index >= count:
            raise ConfigurationError(
                f"data_parallel() was given {place}, but this process has {count} {kind.title}s.",
                do=f"pass devices= from {place.type}:0 on{kind.visible and f', or set {kind.visible} to more of them'}",
            )
    return place


class _Spread:
    """The replacement of a model's forward. A copy or pickle of the model has its own forward again."""

    def __init__(self, model: nn.Module, devices: list[torch.device]) -> None:
        # The model holds this: a strong reference back would keep its memory until a garbage collection.
        self._model_ref = ref(model)
        self._devices = devices

    @property
    def _model(self) -> nn.Module:
        model = self._model_ref()
        if model is None:
            raise ConfigurationError(
                "The model of this data_parallel() forward was deleted.",
                do="keep a reference to the model, and call it: model(...)",
            )
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        copy = memo.get(id(self._model), self._model)
        return MethodType(type(copy).forward, copy)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model, "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        leaves, spec = pytree.tree_flatten((args, kwargs))
        first = first_tensor(leaves)
        if first is None:
            raise ConfigurationError(
                f"data_parallel() found no batch in the arguments of {type(model).__name__}: none is a tensor with "
                "rows.",
                do="pass the samples as a tensor, or as lists, tuples and dicts of tensors",
            )
        num_samples = int(first.shape[0])
        devices = self._devices[: max(min(len(self._devices), num_samples), 1)]
        bounds = [num_samples * number // len(devices) for number in range(len(devices) + 1)]
        sizes = [end - begin for begin, end in pairwise(bounds)]
        runs: list[Callable[[], Any]] = []
        replicas = _replicas(model, devices)
        for number, device in enumerate(devices):
            part = [_part(leaf, bounds[number], sizes[number], num_samples, device) for leaf in leaves]
            own_args, own_kwargs = pytree.tree_unflatten(part, spec)
            runs.append(_in_modes_of_caller(type(model).forward, replicas[number], own_args, own_kwargs, device))
        return _together(_run(runs), sizes, devices, type(model).__name__)


def _in_modes_of_caller(
    forward: Callable[..., Any], replica: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Callable[[], Any]:
    """Return a call for a part of a batch on its device, in the modes of autograd and autocast of this thread."""
    is_grad_enabled, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kind, stream = device.type, stream_of_thread(device)
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def call() -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(on_stream(device, stream))
            stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(torch.set_grad_enabled(is_grad_enabled))
            # Each thread would keep its own cast copies of the weights.
            stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            return forward(replica, *args, **kwargs)

    return call


def _run(runs: list[Callable[[], Any]]) -> list[Any]:
    """Return the output of each part; the first part runs in this thread, as on one device."""
    if len(runs) == 1:
        return [runs[0]()]
    with ThreadPoolExecutor(len(runs) - 1, thread_name_prefix="rankwise-part") as pool:
        others = [pool.submit(run) for run in runs[1:]]
        return [runs[0](), *(one.result() for one in others)]


def _part(leaf: Any, begin: int, size: int, num_samples: int, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.ndim and leaf.shape[0] == num_samples:
        leaf = leaf.narrow(0, begin, size)
    return leaf.to(device, non_blocking=True)


# -- replicas ------------------------------------------------------------------------------------------


def _replicas(model: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Return the model once per device, its parameters being copies that gradients come back from."""
    if all(device == devices[0] for device in devices):
        return [model, *(_alias(model) for _ in devices[1:])]
    if not accelerator.copies_in_groups(devices):
        return [model, *(_copy(model, device) for device in devices[1:])]
    from torch.nn.parallel import replicate  # noqa: PLC0415 - only where there are several GPUs

    found = replicate(cast("Any", model), devices, detach=not torch.is_grad_enabled())
    # The first would write its running statistics into a copy of itself.
    return [model, *found[1:]]


def _copy(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a model on another device, whose parameters are copies that gradients come back from."""
    copies = {id(one): one.to(device) for one in (*model.parameters(), *model.buffers())}
    copy = _alias(model)
    for module, other in zip(model.modules(), copy.modules(), strict=True):
        tables: list[tuple[Any, Any]] = [
            (own_parameters(module), own_parameters(other)),
            (own_buffers(module), own_buffers(other)),
        ]
        for own, others in tables:
            others.update({name: None if one is None else copies[id(one)] for name, one in own.items()})
    return copy


def _alias(model: nn.Module) -> nn.Module:
    """Return a model of the same parameters, with buffers of its own."""
    return aliases(model)[model]


# -- putting together ----------------------------------------------------------------------------------


def _together(outputs: list[Any], sizes: list[int], devices: Sequence[torch.device], name: str) -> Any:
    flat = [pytree.tree_flatten(output) for output in outputs]
    if any(spec != flat[0][1] for _, spec in flat):
        raise _differ(name, [str(spec) for _, spec in flat], devices)
    columns: Iterator[tuple[Any, ...]] = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_joined(column, sizes, devices, name) for column in columns], flat[0][1])


def _joined(parts: tuple[Any, ...], sizes: list[int], devices: Sequence[torch.device], name: str) -> Any:
    first = parts[0]
    if not isinstance(first, torch.Tensor):
        if not isinstance(first, PLAIN):
            raise ConfigurationError(
                f"data_parallel() cannot concatenate the {type(first).__name__} returned by {name}.",
                do="return tensors, or lists, tuples and dicts of them; or register the class: "
                "torch.export.register_dataclass",
            )
        if any(type(part) is not type(first) or part != first for part in parts):
            raise _differ(name, [repr(part) for part in parts], devices)
        return first
    if not first.ndim:
        if not (first.is_floating_point() or first.is_complex()):
            if any(part.item() != first.item() for part in parts):
                raise _differ(name, [repr(part.item()) for part in parts], devices)
            return first
        total = sum(sizes)
        means = [part.to(devices[0]) * (size / total) for part, size in zip(parts, sizes, strict=True)] if total else []
        return torch.stack(means).sum() if len(means) > 1 else first
    lengths = [part.shape[0] for part in parts]
    if any(length * sizes[0] != lengths[0] * size for length, size in zip(lengths, sizes, strict=True)):
        raise ConfigurationError(
            f"The first dimension of an output of {name} is not the batch.",
            evidence="\n".join(
                f"{device}: {size} samples, output {list(part.shape)}"
                for device, size, part in zip(devices, sizes, parts, strict=True)
            ),
            do="return outputs of shape [batch, ...]",
        )
    return torch.cat([part.to(devices[0]) for part in parts])


def _differ(name: str, texts: list[str], devices: Sequence[torch.device]) -> RankwiseError:
    return ConfigurationError(
        f"Outputs of {name} for different parts of a batch cannot be concatenated.",
        evidence="\n".join(f"{device}: {text}" for device, text in zip(devices, texts, strict=True)),
        do="return tensors of shape [batch, ...], and no other values that depend on the samples",
    )
