# SPDX-License-Identifier: Apache-2.0
"""State trees to tensors and a JSON skeleton, and back. Never pickle.

Must not touch files or other ranks. :func:`flatten` lists what a tree may hold; anything else is an error that names
its path.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from rankwise.checkpoint import layouts
from rankwise.checkpoint.files import dtype_name
from rankwise.errors import CheckpointError
from rankwise.tensors.files import CODES
from rankwise.torch_private.modules import metadata_of, set_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rankwise.checkpoint.manifest import Json

MAX_DEPTH = 100
"""Deeper trees are rejected: most likely they contain themselves."""

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_DICTS = {dict: "dict", OrderedDict: "ordered_dict", Counter: "counter"}
_DICT_OF = {tag: kind for kind, tag in _DICTS.items()}
_AS_THEY_ARE = {str, bool, type(None)}
_KEYS = {*_AS_THEY_ARE, int, float}
_NUMBERS = {int, float, complex}
_LISTS: dict[type, str] = {tuple: "tuple", torch.Size: "size"}
_LARGEST_DECIMAL_BITS = 8192
"""Python refuses to read or write decimal integers of more than 4300 digits."""

# Those of the format; complex128 is written as float64, and float8_e8m0fnu holds scales only.
TENSOR_DTYPES = frozenset({dtype_name(dtype) for dtype in CODES} - {"float8_e8m0fnu"} | {"complex128"})
_NUMPY_DTYPES = frozenset(name for name in TENSOR_DTYPES if name != "bfloat16" and "float8" not in name)


def flatten(trees: Mapping[str, object]) -> tuple[dict[str, Json], dict[str, torch.Tensor]]:
    """Separate state trees into JSON skeletons and named tensors. Copies nothing.

    A tree is made of ``dict``, ``OrderedDict``, ``Counter`` (keys: str, int, float, bool, None),
    ``list``, ``tuple``, ``torch.Size``, dense tensors, NumPy arrays and scalars, ``int``,
    ``float``, ``complex``, ``str``, ``bool`` and ``None``. A tensor that occurs in several places
    (tied weights) is named once. DTensors, and meta tensors that stand for what other ranks hold, count as tensors.

    Returns:
        The skeleton of each object, and the tensors by name: the path of the tensor's first place.

    Raises:
        CheckpointError: a tree holds something else; its path and type are named.
    """
    flattener = _Flattener()
    return {name: flattener.encode(tree, name, 0) for name, tree in trees.items()}, flattener.tensors


class _Flattener:
    """One pass over the trees; remembers the tensors it has seen."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._name_of: dict[tuple[object, ...], str] = {}

    def encode(self, value: Any, path: str, depth: int) -> Json:
        if depth > MAX_DEPTH:
            raise CheckpointError(
                f"The state is nested too deeply at {path[:80]}...",
                do="save a tree that does not contain itself",
            )
        kind = type(value)
        is_short = kind is int and value.bit_length() <= _LARGEST_DECIMAL_BITS
        if kind in _AS_THEY_ARE or is_short or (kind is float and math.isfinite(value)):
            return value  # type: ignore[no-any-return]
        if kind in _NUMBERS:
            return _encode_number(value)
        if isinstance(value, torch.Tensor):
            return {"tensor": self._name_tensor(value, path)}
        if kind in _DICTS:
            return self._encode_dict(value, path, depth + 1)
        if kind is list or kind in _LISTS:
            items: Json = [self.encode(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
            return items if kind is list else {_LISTS[kind]: items}
        if kind in (np.ndarray, np.memmap):
            return {"array": self._name_tensor(_tensor_of_array(value, path), path)}
        if not isinstance(value, np.generic):
            raise _refusal(value, path)
        if value.dtype.name not in _NUMPY_DTYPES:
            raise _refusal(value, path, f"a NumPy {value.dtype.name} of type")
        return {"numpy": value.dtype.name, "value": self.encode(value.item(), path, depth)}

    def _encode_dict(self, tree: dict[Any, Any], path: str, depth: int) -> Json:
        kind = type(tree)
        pairs: list[tuple[Any, Json]] = []
        for key, item in tree.items():
            if type(key) not in _KEYS:
                raise _refusal(key, f"{path}[{key!r}]", "a key of type")
            place = f"{path}.{key}" if type(key) is str else f"{path}[{key!r}]"
            # The first two as encode() does, of which a step's state has most.
            if type(item) in _AS_THEY_ARE:
                pairs.append((key, item))
            elif isinstance(item, torch.Tensor) and depth <= MAX_DEPTH:
                pairs.append((key, {"tensor": self._name_tensor(item, place)}))
            else:
                pairs.append((key, self.encode(item, place, depth)))
        are_texts = set(map(type, tree)) <= {str}
        content: Json = dict(pairs) if are_texts else [[self.encode(key, path, depth), item] for key, item in pairs]
        skeleton: dict[str, Json] = {_DICTS[kind]: content}
        metadata = None if kind is dict else metadata_of(tree)  # A plain dict has no attributes.
        if metadata is not None:
            skeleton["metadata"] = self.encode(metadata, f"{path}._metadata", depth)
        return skeleton

    def _name_tensor(self, tensor: torch.Tensor, path: str) -> str:
        """Return the name of a tensor, kept without the class of its owner; a DTensor is kept as it is."""
        dtensor = None if type(tensor) in _PLAIN_TENSORS else layouts.as_dtensor(tensor)
        held = tensor if dtensor is None else layouts.local(dtensor)
        if type(held) not in _PLAIN_TENSORS and _has_own_dispatch(type(held)):
            raise _refusal(held, path)
        if held.layout != torch.strided or held.is_quantized:
            raise _refusal(held, path, f"a {held.layout} tensor on {held.device} of type")
        if dtype_name(held.dtype) not in TENSOR_DTYPES:
            raise _refusal(held, path, f"a {held.dtype} tensor of type")
        tensor = tensor.detach().as_subclass(torch.Tensor) if dtensor is None else dtensor.detach()
        key = layouts.identity(tensor)
        if tensor.numel() and key in self._name_of:
            return self._name_of[key]
        name = path if path != "__metadata__" else f"{path}.tensor"
        while name in self.tensors:
            name += "'"
        self.tensors[name] = tensor
        self._name_of[key] = name
        return name


def child(path: str, key: object) -> str:
    """Return the path of an entry of a dict, as in ``model.fc.weight`` or ``state[0]``."""
    return f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"


def unflatten(skeleton: Json, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """Return the state tree of a skeleton.

    Args:
        skeleton: as :func:`flatten` made it.
        tensor_of: returns the tensor of a name; called once per place. A tensor on the meta device, even in the
            place of an array, stays as it is.

    Raises:
        CheckpointError: the skeleton holds a value of an unknown kind.
    """
    if isinstance(skeleton, list):
        return [unflatten(item, tensor_of) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag, content = cast("tuple[str, Any]", next(iter(skeleton.items()), ("", None)))
    if tag == "tensor":
        return tensor_of(content)
    if tag == "array":
        array = tensor_of(content)
        return array if array.is_meta else array.numpy()
    if tag in _LISTS.values():
        items = [unflatten(item, tensor_of) for item in content]
        return tuple(items) if tag == "tuple" else torch.Size(items)
    if tag in _DICT_OF:
        return _decode_dict(skeleton, tag, tensor_of)
    return _decode_number(tag, skeleton)


def _decode_dict(skeleton: dict[str, Any], tag: str, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    tree: dict[Any, Any] = _DICT_OF[tag]()
    for key, item in _pairs(skeleton[tag]):
        tree[unflatten(key, tensor_of)] = unflatten(item, tensor_of)
    if "metadata" in skeleton:
        set_metadata(tree, unflatten(skeleton["metadata"], tensor_of))
    return tree


def _pairs(content: object) -> Iterable[tuple[Any, Any]]:
    """Return keys and entries of a dict, which JSON holds as pairs unless all keys are text."""
    if isinstance(content, dict):
        return cast("dict[str, Any]", content).items()
    return cast("list[tuple[Any, Any]]", content)


def _encode_number(value: complex) -> Json:
    """Return a number that JSON does not have, or whose digits Python would refuse to read."""
    if isinstance(value, complex):
        return {"complex": [one if math.isfinite(one) else {"float": repr(one)} for one in (value.real, value.imag)]}
    return {"int": hex(value)} if isinstance(value, int) else {"float": repr(value)}


def _decode_number(tag: str, skeleton: dict[str, Any]) -> Any:
    content: Any = skeleton.get(tag)
    if tag == "float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if tag == "int":
        return int(content, 16)
    if tag == "complex":
        real, imaginary = (unflatten(part, _no_tensor) for part in content)
        return complex(real, imaginary)
    if tag == "numpy" and content in _NUMPY_DTYPES:
        return np.dtype(content).type(unflatten(skeleton["value"], _no_tensor))
    raise CheckpointError(
        f"The checkpoint holds a value of an unknown kind: {tag!r}.",
        do="load it with the version of rankwise that wrote it",
    )


def _no_tensor(name: str) -> torch.Tensor:
    raise CheckpointError(f"The checkpoint has a tensor, {name!r}, where a number must be.")


def _has_own_dispatch(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", None) is not getattr(torch.Tensor, "__torch_dispatch__", None)


def _tensor_of_array(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    if array.dtype.name not in _NUMPY_DTYPES or not array.dtype.isnative:
        raise _refusal(array, path, f"an array of {array.dtype.str} of type")
    plain = np.asarray(array)
    if not (plain.flags.writeable and plain.flags.c_contiguous):
        plain = plain.copy()
    tensor: torch.Tensor = cast("Any", torch).from_numpy(plain)
    return tensor


def _refusal(value: object, path: str, what: str = "a") -> CheckpointError:
    kind = type(value)
    return CheckpointError(
        f"{path} cannot be saved: it is {what} {kind.__module__}.{kind.__qualname__}.",
        evidence="nothing was written",
        do="keep tensors, NumPy arrays, numbers, text, lists, tuples and dicts in the state; "
        "convert other objects to these in state_dict()",
    )


def leaves(skeleton: Json, path: str, tensors: Mapping[str, str]) -> dict[str, str]:
    """Return each leaf of a skeleton with root ``path`` as text by its path, with a given text for each tensor."""
    content: Any = skeleton
    tag = "list" if isinstance(skeleton, list) else "scalar"
    if isinstance(skeleton, dict):
        tag, content = next(iter(skeleton.items()), ("", None))
    if tag in ("tensor", "array"):
        return {path: tensors[str(content)]}
    if tag in _DICT_OF:
        parts = [leaves(item, child(path, unflatten(key, _no_tensor)), tensors) for key, item in _pairs(content)]
    elif tag == "list" or tag in _LISTS.values():
        items = cast("list[Json]", content)
        parts = [leaves(item, f"{path}[{i}]", tensors) for i, item in enumerate(items)]
    else:
        return {path: json.dumps(skeleton)}
    merged = {path: f"empty {tag}"} if not parts else {}
    for part in parts:
        merged.update(part)
    return merged
