# SPDX-License-Identifier: Apache-2.0
"""A value as a JSON head and bytes, and back. Pure: sends nothing, and runs no code that was sent.

Tensors, NumPy arrays, numbers, strings, ``None``, and torch's dtypes and shapes, alone or in lists, tuples and dicts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from rankwise.errors import ConfigurationError
from rankwise.tensors.arrays import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ARRAY_KINDS = "biufc"
"""NumPy's kind letters of numeric dtypes."""
LARGEST_INTEGER_BITS = 8192
"""Python refuses decimal integers of more than 4300 digits."""


@dataclass(slots=True)
class Packed:
    """A value to be sent."""

    tree: Any = None
    """Its structure as JSON; the tensors in it with dtype and shape."""
    buffers: list[memoryview] = field(default_factory=list)
    """A copy of the bytes of its tensors and arrays, in the order of the tree."""
    sources: list[torch.Tensor] = field(default_factory=list)
    """The tensors in it that receive gradients."""
    words: list[str] = field(default_factory=list)
    """Its description for errors."""


def pack(value: object) -> Packed:
    """Return a value in a form that can be sent: a copy, which later changes of the value do not affect.

    Raises:
        ConfigurationError: it contains something that cannot be sent.
    """
    packed = Packed()
    packed.tree = _node_of(value, packed)
    return packed


def unpack(tree: Any, buffers: Sequence[torch.Tensor], device: torch.device) -> tuple[Any, list[torch.Tensor]]:
    """Return the value that :func:`pack` was given, and those of its tensors that require a gradient.

    ``buffers`` are [n] bytes each, one per tensor and array. The value uses their memory; its tensors are on
    ``device``.
    """
    wanting: list[torch.Tensor] = []
    return _value_of(tree, iter(buffers), device, wanting), wanting


def replaced(value: Any, by: dict[int, torch.Tensor]) -> Any:
    """Return an unpacked value with some of its tensors replaced, found by their ``id``."""
    if isinstance(value, torch.Tensor):
        return by.get(id(value), value)
    if type(value) in {list, tuple}:
        return type(value)(replaced(one, by) for one in value)
    if type(value) is dict:
        return {key: replaced(one, by) for key, one in value.items()}
    return value


def sizes_of(tree: Any) -> list[int]:
    """Return how many bytes each tensor and array of a tree has, in order."""
    if not isinstance(tree, list):
        return []
    kind, *rest = tree
    if kind == "tensor":
        return [prod(rest[1]) * _dtype(rest[0]).itemsize]
    if kind in {"array", "scalar"}:
        return [prod(rest[1]) * np.dtype(rest[0]).itemsize]
    if kind == "dtype":
        return []
    nodes = [node for _, node in rest[0]] if kind == "dict" else rest[0]
    return [size for node in nodes for size in sizes_of(node)]


def _node_of(value: Any, packed: Packed) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor_node(value, packed)
    if isinstance(value, np.ndarray | np.generic):
        return _array_node(value, packed)
    kind = type(value)
    if kind is int and value.bit_length() > LARGEST_INTEGER_BITS:
        raise ConfigurationError(
            f"send cannot send an integer of {value.bit_length()} bits.", do="send it as a string: hex(value)"
        )
    if value is None or kind in {bool, int, float, str}:
        packed.words.append(kind.__name__)
        return value
    if kind is torch.dtype:
        name = str(value).removeprefix("torch.")
        packed.words.append(name)
        return ["dtype", name]
    if kind in {list, tuple, torch.Size}:
        return [kind.__name__, [_node_of(one, packed) for one in value]]
    if kind is dict and all(type(key) in {str, int} for key in value):
        return ["dict", [[key, _node_of(one, packed)] for key, one in value.items()]]
    what = (
        "a dict with keys other than strings and integers" if kind is dict else f"{kind.__module__}.{kind.__qualname__}"
    )
    raise ConfigurationError(
        f"send cannot send {what}.",
        do="send tensors, NumPy arrays, numbers and strings, in lists, tuples and dicts; "
        "take other objects apart before send(), and rebuild them after recv()",
    )


def _tensor_node(tensor: torch.Tensor, packed: Packed) -> list[Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    packed.words.append(f"{name}{list(tensor.shape)}")
    if hasattr(tensor, "to_local"):
        raise ConfigurationError(
            "send cannot send a DTensor: only a part of it is on this rank.",
            do="send tensor.full_tensor() or tensor.to_local()",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = "quantised" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
        raise ConfigurationError(f"send cannot send a tensor that is {kind}.", do="send tensor.to_dense()")
    wants_gradient = tensor.requires_grad and torch.is_grad_enabled()
    if wants_gradient:
        packed.sources.append(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().as_subclass(torch.Tensor)
    copy = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    packed.buffers.append(memory_of(copy))
    return ["tensor", name, list(tensor.shape), wants_gradient]


def _array_node(array: np.ndarray[Any, Any] | np.generic, packed: Packed) -> list[Any]:
    packed.words.append(f"numpy {array.dtype.name}{list(array.shape)}")
    if array.dtype.kind not in ARRAY_KINDS:
        raise ConfigurationError(
            f"send cannot send a NumPy array of {array.dtype}.", do="send arrays of numbers or booleans"
        )
    packed.buffers.append(memoryview(np.asarray(array).tobytes()))
    return ["scalar" if isinstance(array, np.generic) else "array", array.dtype.str, list(array.shape)]


def _value_of(tree: Any, buffers: Iterator[torch.Tensor], device: torch.device, wanting: list[torch.Tensor]) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, *rest = tree
    if kind == "tensor":
        name, shape, wants_gradient = rest
        dtype = _dtype(name)
        data = next(buffers)
        tensor = torch.empty(0, dtype=dtype)
        # Not a view of the bytes: autograd refuses to change a view that a function of its own returns.
        cast("Any", tensor).set_(data.untyped_storage(), 0, tuple(shape))
        tensor = tensor.to(device)
        if wants_gradient:
            wanting.append(tensor)
        return tensor
    if kind in {"array", "scalar"}:
        name, shape = rest
        array = np.frombuffer(next(buffers).numpy().data, np.dtype(name)).reshape(shape)
        return array if kind == "array" else array[()]
    if kind == "dtype":
        return _dtype(rest[0])
    if kind == "dict":
        return {key: _value_of(node, buffers, device, wanting) for key, node in rest[0]}
    values = [_value_of(node, buffers, device, wanting) for node in rest[0]]
    if kind == "Size":
        return torch.Size(values)
    return values if kind == "list" else tuple(values)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(
            f"A tensor of {name} was received, which this rank's torch does not have.",
            do="use one version of torch on every rank",
        )
    return dtype
