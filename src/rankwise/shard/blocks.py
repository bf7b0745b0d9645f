# SPDX-License-Identifier: Apache-2.0
"""The modules of a model that are sharded as one: by name, by class, by size; and those that compute forward twice.

Activation checkpointing is in place: a block keeps its class, its keys and its hooks; only its ``forward`` is replaced.
Used by shard.
"""

from __future__ import annotations

import difflib
import re
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rankwise.errors import ConfigurationError
from rankwise.replicate.blocks import blocks as repeated_blocks
from rankwise.replicate.blocks import matching
from rankwise.torch_private.modules import BatchNorm

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from contextlib import AbstractContextManager


Blocks = int | str | list[str] | tuple[str, ...] | list[type[nn.Module]] | tuple[type[nn.Module], ...] | None
"""Names, classes, or a minimum size; ``None`` for the repeated layers."""

SMALL_PART = 0.02
"""Fraction of the model's bytes below which a single layer is no block of its own."""

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def block_names(model: nn.Module, blocks: Blocks, argument: str) -> list[str]:
    """Return the names of the modules that ``blocks`` stands for, inner ones first.

    Args:
        model: the whole model.
        blocks: as for :func:`rankwise.shard`.
        argument: name of the caller's argument, for the error.

    Raises:
        ConfigurationError: a name or class that the model does not have, or something else.
    """
    if blocks is None:
        found = _without_small_layers(model, repeated_blocks(model))
    elif isinstance(blocks, bool):
        raise _not_blocks(blocks, argument)
    elif isinstance(blocks, int | str):
        least_bytes = blocks if isinstance(blocks, int) else _bytes_of(blocks, argument)
        if least_bytes <= 0:
            raise _not_blocks(blocks, argument)
        found = _at_least(model, least_bytes)
    elif not isinstance(blocks, list | tuple):
        raise _not_blocks(blocks, argument)
    elif all(isinstance(one, str) for one in blocks):
        found = [name for pattern in blocks for name in _matching(model, str(pattern), argument)]
    elif all(isinstance(one, type) and issubclass(one, nn.Module) for one in blocks):
        found = _of_classes(model, [one for one in blocks if isinstance(one, type)], argument)
    else:
        raise _not_blocks(blocks, argument)
    runnable = [name for name in dict.fromkeys(found) if name and _is_called(model, name)]
    return sorted(runnable, key=lambda name: -name.count("."))


def grouped(model: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """Return the blocks in groups, one for blocks with common parameters: torch has each parameter in one group.

    A block that shares a parameter with a module in no block is left out: it is gathered with the whole model.
    """
    group_of: dict[str, list[str]] = {name: [name] for name in ["", *names]}
    owner: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        innermost = max((block for block in names if name.startswith(f"{block}.")), key=len, default="")
        first, second = group_of[owner.setdefault(parameter, innermost)], group_of[innermost]
        if first is not second:
            first += second
            group_of.update(dict.fromkeys(second, first))
    return [group for group in {id(group_of[name]): group_of[name] for name in names}.values() if "" not in group]


def _without_small_layers(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Leave out small single layers: a message of their own would cost more than they save."""
    whole = sum(parameter.nbytes for parameter in model.parameters())
    modules = [(name, model.get_submodule(name)) for name in names]
    sizes = {name: sum(parameter.nbytes for parameter in module.parameters()) for name, module in modules}
    return [
        name
        for name, module in modules
        if sizes[name] >= SMALL_PART * whole or (sizes[name] and list(module.children()))
    ]


def _is_called(model: nn.Module, name: str) -> bool:
    """Whether a module is called itself: not a list of layers, nor a layer whose weights MultiheadAttention reads."""
    above = model.get_submodule(name.rpartition(".")[0])
    is_list = isinstance(model.get_submodule(name), nn.ModuleList | nn.ModuleDict)
    return not (is_list or isinstance(above, nn.MultiheadAttention))


def _at_least(model: nn.Module, least_bytes: int) -> list[str]:
    """Return the smallest blocks of at least so many bytes, from the inside out."""
    taken: set[nn.Parameter] = set()
    found: list[str] = []

    for name, module in sorted(model.named_modules(), key=lambda named: -named[0].count(".")):
        left = [parameter for parameter in module.parameters() if parameter not in taken]
        if name and _is_called(model, name) and left and sum(parameter.nbytes for parameter in left) >= least_bytes:
            found.append(name)
            taken.update(left)
    return found


def _bytes_of(text: str, argument: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigurationError(
            f"{argument}={text!r} is not a size.",
            do=f'pass a size as "100MiB", or names of modules as a list: {argument}=[{text!r}]',
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _matching(model: nn.Module, pattern: str, argument: str) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    found = matching(pattern, names)
    if not found:
        near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.3)
        raise ConfigurationError(
            f"{argument} names {pattern!r}, but the model has no such module.",
            evidence="nearest: " + ", ".join(near) if near else f"the model has {', '.join(names[:10])}",
            do="pass names from model.named_modules(), with * for a part: layers.*",
        )
    return found


def _of_classes(model: nn.Module, classes: Sequence[type], argument: str) -> list[str]:
    found: list[str] = []
    for one in classes:
        names = [name for name, module in model.named_modules() if isinstance(module, one)]
        if not names:
            have = sorted({type(module).__name__ for module in model.modules()})
            near = difflib.get_close_matches(one.__name__, have, n=5, cutoff=0.3)
            raise ConfigurationError(
                f"{argument} names the class {one.__name__}, but the model has no module of this class.",
                evidence=f"nearest: {', '.join(near or have[:10])}",
                do="pass a class of a module of the model",
            )
        found += names
    return found


def _not_blocks(blocks: object, argument: str) -> ConfigurationError:
    return ConfigurationError(
        f"{argument}={blocks!r} does not name blocks.",
        do='pass a list of names (["layers.*"]) or of classes ([Block]), a size as "100MiB" or in bytes, or None for '
        "the layers that repeat",
    )


def recompute_block(block: nn.Module) -> None:
    """Have ``block`` keep only its inputs for backward. The same gradients, also with dropout and BatchNorm.

    A block that changes anything but BatchNorm's statistics when it runs (a cache of keys and values) cannot run twice.

    Source: torch.utils.checkpoint, without reentry (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
        2016).
    """
    if not isinstance(block.__dict__.get("forward"), _Recomputed):
        block.forward = _Recomputed(block)


class _Recomputed:
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
