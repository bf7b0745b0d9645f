# SPDX-License-Identifier: Apache-2.0
"""Values as the tensors in them, and back: what is sent, and the words by which ranks compare their calls.

A value is a tensor, a NumPy array or scalar, a Python number, an array with ``__dlpack__`` (JAX, CuPy, TensorFlow), or
a list, tuple or dict of them. No such library is imported here: a caller that passes its array has imported it. Also
the values in an object of any class, as a user's class of samples or of graphs, and the tensors among them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from rankwise.errors import ConfigurationError
from rankwise.torch_private.tensors import TreeSpec, tree_flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

K = TypeVar("K", bound="Hashable")

SENT_TOGETHER_BYTES = 2**16
"""Up to this size tensors travel together: a message takes about as long for a hundred numbers as for one."""


def tensor_of(leaf: object, name: str, other: str) -> torch.Tensor:
    """Return a leaf as a tensor on its own device; a tensor unchanged.

    Args:
        leaf: tensor, array or number.
        name: of the call that it was passed to, for the error.
        other: the call that takes other objects.

    Raises:
        ConfigurationError: it is none of these, or its memory cannot be sent as it is.
    """
    if isinstance(leaf, torch.Tensor):
        if leaf.is_meta or leaf.is_quantized or leaf.layout != torch.strided or hasattr(leaf, "full_tensor"):
            raise _refused(leaf, name)
        return leaf
    if isinstance(leaf, np.ndarray | np.generic):
        return _from_numpy(leaf, name)
    if isinstance(leaf, bool | int):
        return _from_int(leaf, name)
    if isinstance(leaf, float | complex):
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.complex128)
    if _package_of(leaf) == "tensorflow":
        leaf = _of_tensorflow(leaf, name)
    if hasattr(leaf, "__dlpack__"):
        return _from_dlpack(leaf, name)
    raise ConfigurationError(
        f"{name} takes tensors, arrays and numbers, got {type(leaf).__name__}.",
        do=f"use {other} for other objects",
    )


def back(leaf: object, tensor: torch.Tensor) -> Any:
    """Return ``tensor``, which has no other owner, as an object of the type of ``leaf``."""
    if isinstance(leaf, torch.Tensor):
        return tensor
    if isinstance(leaf, np.generic):
        return leaf.dtype.type(tensor.item())
    if isinstance(leaf, np.ndarray):
        return tensor.numpy().astype(leaf.dtype, copy=False)
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)(tensor.item())
    return _reader_of(leaf)(tensor.contiguous())


def _refused(leaf: torch.Tensor, name: str) -> ConfigurationError:
    if leaf.is_meta:
        kind, do = "on the meta device", "give it values first: it has nothing to send"
    elif hasattr(leaf, "full_tensor"):
        kind, do = "that each rank holds a part of", "pass tensor.to_local() or full_tensor()"
    elif leaf.layout != torch.strided:
        kind, do = f"of layout {leaf.layout}", "pass tensor.to_dense(), or its parts"
    else:
        kind, do = "that is quantized", "pass tensor.int_repr() or dequantize()"
    return ConfigurationError(f"{name} cannot take a tensor {kind}.", do=do)


def _from_int(leaf: int, name: str) -> torch.Tensor:
    if not -(2**63) <= leaf < 2**63:
        raise ConfigurationError(f"{name} cannot take {leaf}: it does not fit into 64 bits.", do="pass a float")
    return torch.tensor(int(leaf), dtype=torch.int64)


def _from_numpy(leaf: np.ndarray[Any, Any] | np.generic, name: str) -> torch.Tensor:
    if isinstance(leaf, np.ma.MaskedArray):
        raise ConfigurationError(
            f"{name} cannot take a masked array: its masked elements would be included.",
            do="pass array.filled(0), and the mask as a separate array: ~numpy.ma.getmaskarray(array)",
        )
    try:
        return torch.from_numpy(np.array(leaf, dtype=leaf.dtype.newbyteorder("=")))
    except TypeError as error:
        raise ConfigurationError(
            f"{name} cannot take a NumPy array of {leaf.dtype}: torch has no such dtype.",
            do="convert it first, strings to bytes: np.frombuffer(text.encode(), np.uint8)",
        ) from error


def _from_dlpack(leaf: object, name: str) -> torch.Tensor:
    _reader_of(leaf)
    try:
        # A copy: the memory may be read-only, and must not change while it is sent.
        return torch.from_dlpack(leaf).clone()
    except AttributeError as error:
        raise _without_memory(leaf, name, "jit, grad and vmap", str(error)) from error
    except (RuntimeError, BufferError, TypeError, ValueError) as error:
        kind = type(leaf)
        raise ConfigurationError(
            f"{name} cannot take this {kind.__module__}.{kind.__qualname__}: torch cannot read its memory.",
            evidence=str(error),
            do="pass numpy.asarray(value), or a dtype and a device that torch has too",
        ) from error


def _without_memory(leaf: object, name: str, inside_of: str, evidence: str = "") -> ConfigurationError:
    return ConfigurationError(
        f"{name} cannot take a {type(leaf).__qualname__}: it stands for an array and has no memory.",
        evidence=evidence or None,
        do=f"call {name} on the result of {inside_of}, not inside it",
    )


def _reader_of(leaf: object) -> Any:
    """Return the function of the leaf's own library that reads what ``__dlpack__`` offers."""
    namespace = getattr(leaf, "__array_namespace__", None)
    if namespace is not None:
        return namespace().from_dlpack
    package = _package_of(leaf)
    if package == "tensorflow":
        return _tensorflow_reader
    reader = getattr(sys.modules.get(package), "from_dlpack", None)
    if reader is None:
        raise ConfigurationError(
            f"{package} has no from_dlpack() that could return the result as {type(leaf).__name__}.",
            do="pass it as a NumPy array",
        )
    return reader


def _package_of(leaf: object) -> str:
    return type(leaf).__module__.partition(".")[0]


def _of_tensorflow(leaf: Any, name: str) -> object:
    """Return the tensor that a variable holds, or a tensor unchanged."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and dtype.name in {"string", "variant", "resource"}:
        # TensorFlow ends the process when the memory of such a tensor is requested.
        raise ConfigurationError(
            f"{name} cannot take a TensorFlow tensor of {dtype.name}: it has no memory that torch can read.",
            do="pass its values as numbers; strings as bytes: tf.io.decode_raw(text, tf.uint8)",
        )
    value = leaf.value() if isinstance(leaf, sys.modules["tensorflow"].Variable) else leaf
    if isinstance(value, sys.modules["tensorflow"].Tensor) and not hasattr(value, "__dlpack__"):
        raise _without_memory(leaf, name, "tf.function")
    return value


def _tensorflow_reader(tensor: torch.Tensor) -> Any:
    return sys.modules["tensorflow"].experimental.dlpack.from_dlpack(tensor.__dlpack__())


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor as they are sent: contiguous, without a graph; in the same memory if they are."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as [n] bytes in the same memory."""
    # One element counts as contiguous at any stride; torch's view does not think so.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, to send from or to receive into."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def memory_of_values(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's values on the CPU: those of :func:`as_sent`, in the same memory if they can be."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy().data


# -- values of several -------------------------------------------------------------------------------


def flattened(value: object, name: str) -> tuple[list[object], list[torch.Tensor], TreeSpec]:
    """Return the leaves of a value, each as a tensor, and the structure to rebuild it.

    Raises:
        ConfigurationError: it contains something that cannot be sent.
    """
    leaves, spec = tree_flatten(value)
    other = "rankwise.broadcast_object()" if name == "broadcast" else "rankwise.all_gather_object()"
    tensors: list[torch.Tensor] = []
    for leaf in leaves:
        tensors.append(tensor_of(leaf, name, other))  # noqa: PERF401 - a list comprehension is one more call
    return leaves, tensors, spec


def dtype_word(tensor: torch.Tensor) -> str:
    """Return ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def kind(tensor: torch.Tensor) -> str:
    """Return ``float32[2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def kinds(tensors: list[torch.Tensor], spec: TreeSpec) -> str:
    """Return ``{loss: float32[], parts: [int64[3], int64[2]]}``: the kinds of all, in their places."""
    return kind(tensors[0]) if spec.is_leaf() else _in_tree(map(kind, tensors), spec)


def dtypes(tensors: list[torch.Tensor], spec: TreeSpec) -> str:
    """Return ``{loss: float32, parts: [int64, int64]}``: as :func:`kinds`, without the shapes."""
    return _in_tree(map(dtype_word, tensors), spec)


def _in_tree(words: Iterator[str], spec: TreeSpec) -> str:
    if spec.is_leaf():
        return next(words)
    parts = [_in_tree(words, child) for child in spec.children()]
    if spec.type not in {dict, OrderedDict, defaultdict}:
        return f"[{', '.join(parts)}]"
    # Leaves are in the order in which a dict was filled: with another order they would be mixed up.
    keys = spec.context[1] if spec.type is defaultdict else spec.context
    return f"{{{', '.join(f'{key}: {part}' for key, part in zip(keys, parts, strict=True))}}}"


def sent_by_dtype(tensors: Sequence[torch.Tensor], send: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Return ``send`` of each of some contiguous tensors, where it computes element by element.

    Called by: every rank, with tensors of the same shapes and dtypes. Returns a new tensor for each, of its shape.
    """
    if len(tensors) == 1:
        return [send(tensors[0])]
    results: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    for places in _packs(tensors, [(tensor.device, tensor.dtype) for tensor in tensors]):
        if len(places) == 1:
            results[places[0]] = send(tensors[places[0]])
            continue
        whole = send(torch.cat([tensors[place].reshape(-1) for place in places]))
        pieces = whole.split([tensors[place].numel() for place in places])
        for place, piece in zip(places, pieces, strict=True):
            # Of its own: in memory of all, a saved leaf would be as large as all of them.
            results[place] = piece.clone().view(tensors[place].shape)
    return results


def sent_as_bytes(
    tensors: Sequence[torch.Tensor], send: Callable[[torch.Tensor], torch.Tensor], num_rows: int
) -> list[torch.Tensor]:
    """Return ``send`` of each of some contiguous tensors, where it moves them: [num_rows, *shape] each.

    Called by: every rank, with tensors of the same shapes and dtypes.
    """
    results: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    for places in _packs(tensors, [tensor.device for tensor in tensors]):
        if len(places) == 1:
            results[places[0]] = send(tensors[places[0]])
            continue
        whole = send(torch.cat([bytes_of(tensors[place]) for place in places])).view(num_rows, -1)
        pieces = whole.split([tensors[place].nbytes for place in places], dim=1)
        for place, piece in zip(places, pieces, strict=True):
            like = tensors[place]
            # A copy is aligned for its dtype.
            results[place] = (
                piece.clone(memory_format=torch.contiguous_format).view(like.dtype).view(num_rows, *like.shape)
            )
    return results


def _packs(tensors: Sequence[torch.Tensor], keys: Sequence[K]) -> list[list[int]]:
    """Return the positions of tensors that travel together: small ones with the same key."""
    packs: list[list[int]] = []
    open_of: dict[K, list[int]] = {}
    for place, (tensor, key) in enumerate(zip(tensors, keys, strict=True)):
        if tensor.nbytes > SENT_TOGETHER_BYTES or not tensor.numel():
            packs.append([place])
        elif key in open_of:
            open_of[key].append(place)
        else:
            packs.append(open_of.setdefault(key, [place]))
    return packs


# -- values in objects of any class ----------------------------------------------------------------

_DEEPEST = 5
"""Containers and objects inside each other in which tensors are looked for."""


def attributes_of(value: object) -> dict[str, object]:
    """Return the attributes that an object holds, whether its class has slots or not.

    Classes, functions, Python's modules and layers have none: they are code, or state that is not a sample's.
    """
    if isinstance(value, type | FunctionType | MethodType | ModuleType | torch.nn.Module | torch.Tensor):
        return {}
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind) if hasattr(value, name)]
    return {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})


def _slots_of(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [one for one in ((slots,) if isinstance(slots, str) else slots) if not one.startswith("__")]


def tensors_in(value: object) -> list[tuple[str, torch.Tensor]]:
    """Return the plain tensors in containers and objects inside each other, in order, with the path to each."""
    found: list[tuple[str, torch.Tensor]] = []
    pending: list[tuple[str, object, int]] = [("", value, 0)]
    while pending:
        path, one, depth = pending.pop()
        parts: Iterable[tuple[Any, object]] = ()
        if type(one) is torch.Tensor:
            found.append((path, one))
        elif depth >= _DEEPEST or isinstance(one, str | bytes | int | float | None):
            continue
        elif isinstance(one, list | tuple):
            parts = enumerate(one)
        else:
            parts = (one if isinstance(one, Mapping) else attributes_of(one)).items()
        pending += [(f"{path}/{key}", part, depth + 1) for key, part in parts][::-1]
    return found
