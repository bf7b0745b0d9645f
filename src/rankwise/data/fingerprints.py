# SPDX-License-Identifier: Apache-2.0
"""The comparable parts of a dataset: the values of a sample, and the lists of all samples, with digests.

The lists are known without reading a sample: the indices of subsets, the names of files. Values only: reads no
dataset, draws nothing, does no communication.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Subset

from rankwise.tensors.arrays import attributes_of

_MOST_ELEMENTS = 2**20
"""Elements of one array that are digested, evenly spaced: a volume of 512**3 would take a second."""
_MOST_ITEMS = 256
"""Items of one list that are compared one by one."""
_SKETCH_ELEMENTS = 101
"""Odd, so that positions in an image do not all fall on a few of its columns."""
_MOST_IN_BLOCK = 8
_SHOWN_ELEMENTS = 4
_SHOWN_CHARACTERS = 60
_DOUBLE_COMPLEX = 16
_SMALL = 8
"""A byte array of at most this many elements holds labels, not an image."""

_LENGTH = "length"
_SAY_NOTHING = (_LENGTH, "NoneType", "float")

_ROUNDING = 1e-5
_COARSE_ROUNDING = 2e-2
_COARSE = ("float16", "bfloat16")
_BETWEEN_HOSTS = 0.05
_MOST_UNLIKE = 0.1
_AS_NUMPY = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_MOST_LISTS = 8
_PAIR = 2
_MOST_OBJECTS = 256
"""Objects in one sample of which attributes are compared: some hold the whole dataset."""


class Leaf(NamedTuple):
    """One value of a sample: a tensor, an array, a number, a string."""

    path: str
    """Where it is in the sample: ``['image']``, ``[1]``, empty for the sample itself."""
    kind: str
    """Type and shape, as ``float32[3, 32, 32]``; ``text`` for strings."""
    digest: str
    """Of type and content, in hexadecimal digits."""
    shown: str
    """The value for an error, shortened."""
    sketch: list[float]
    """Some of its elements, then their mean and root mean square over all. Empty if only the digest counts."""

    @property
    def is_label(self) -> bool:
        """Whether it is one integer or string, which no augmentation changes: a class, an index, a name."""
        return not self.sketch and not self.kind.endswith("]") and self.kind not in _SAY_NOTHING


def leaves_of(sample: object) -> list[Leaf]:
    """Return the comparable values of ``sample``, in order.

    Tensors, arrays, PIL images, numbers, booleans, None, texts, bytes and paths, in lists, tuples, mappings and
    attributes of objects. Of a string that is a path the last part is compared: hosts may keep the same files in
    different folders.
    """
    return list(_leaves(sample, "", set()))


def unlike(one: Leaf, other: Leaf, *, same_host: bool) -> bool:
    """Return whether two ranks' values are different data.

    Integers and strings must be equal. Floating-point numbers may differ by rounding. Between hosts, images and
    floating-point numbers may differ as much as two versions of a decoder do.
    """
    if one.digest == other.digest:
        return False
    if one.kind != other.kind or not one.sketch or len(one.sketch) != len(other.sketch):
        return True
    is_bytes = one.kind.startswith(("uint8", "PIL"))
    if same_host and is_bytes:
        return True
    a, b = np.array(one.sketch), np.array(other.sketch)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return True
    finite = np.isfinite(a)
    if not finite.any():
        return False
    scale = max(float(np.abs(a[finite]).max()), float(np.abs(b[finite]).max()))
    apart = np.where(finite, np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)), 0)
    if not same_host:
        limit = _BETWEEN_HOSTS * scale
        return bool(np.mean(apart > limit) > _MOST_UNLIKE or apart[-2:].max() > limit)
    return bool(apart.max() > scale * (_COARSE_ROUNDING if one.kind.startswith(_COARSE) else _ROUNDING))


def describe_block(samples: list[Any]) -> str:
    """Return the comparable values of the first global batch of a stream, as JSON; empty if there are none.

    A stream cannot be read twice to see which of its values are random. So a sample that holds an integer or a
    string (a class, an index, a name) is compared by these, and any other by all of its values.
    """
    chosen = sorted(
        set(np.linspace(0, len(samples) - 1, min(_MOST_IN_BLOCK, len(samples))).round().astype(int).tolist())
    )
    try:
        found = {index: _comparable(leaves_of(samples[index])) for index in chosen}
    except Exception:  # noqa: BLE001 - a sample may be anything
        return ""
    return json.dumps(found)


def _comparable(leaves: list[Leaf]) -> list[Leaf]:
    return [leaf for leaf in leaves if leaf.is_label] or leaves


def _leaves(value: Any, path: str, seen: set[int]) -> Iterator[Leaf]:  # noqa: C901 - a case per type reads best in one place
    """Yield the values in ``value``, apart from objects that were ``seen``: some refer to each other."""
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(value, path)
    elif isinstance(value, np.ndarray | np.generic):
        yield from _of_array(np.asarray(value), path)
    elif value is None or isinstance(value, bool | int | float | complex):
        is_real = isinstance(value, float)
        content = repr(value)
        sketch = [value, value, abs(value)] if is_real else []
        yield Leaf(path, type(value).__name__, digest_of(content.encode()), content, sketch)
    elif isinstance(value, str | os.PathLike):
        name = path_free(os.fspath(value))
        yield Leaf(path, "text", digest_of(os.fsencode(name)), _shortened(repr(name)), [])
    elif isinstance(value, bytes | bytearray):
        yield Leaf(path, f"bytes[{len(value)}]", digest_of(value), _shortened(repr(bytes(value[:64]))), [])
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]", seen)
    elif isinstance(value, list | tuple):
        yield from _of_list(value, path, seen)
    elif type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "mode"):
        (leaf,) = _of_array(np.asarray(value), path)
        yield leaf._replace(kind=f"PIL {value.mode} {leaf.kind}")
    elif id(value) not in seen and len(seen) < _MOST_OBJECTS:
        seen.add(id(value))
        for name, item in attributes_of(value).items():
            yield from _leaves(item, f"{path}.{name}", seen)


def _of_list(value: list[Any] | tuple[Any, ...], path: str, seen: set[int]) -> Iterator[Leaf]:
    if len(value) > _SHOWN_ELEMENTS and all(type(item) in (int, float) for item in value):
        # Such as the tokens of a text.
        yield from _of_array(np.asarray(value), path)
        return
    words = f"{type(value).__name__} of {len(value)}"
    yield Leaf(f"{path}.length", _LENGTH, digest_of(words.encode()), words, [])
    for number, item in enumerate(value[:_MOST_ITEMS]):
        yield from _leaves(item, f"{path}[{number}]", seen)


def _of_tensor(tensor: torch.Tensor, path: str) -> Iterator[Leaf]:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        return
    plain = tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg()
    name = str(plain.dtype).removeprefix("torch.")
    if not (plain.dtype.is_complex or name in _AS_NUMPY):
        plain = plain.float()  # bfloat16 and the 8-bit floats, which NumPy lacks
    yield from _of_array(plain.numpy(), path, name)


def _of_array(array: npt.NDArray[Any], path: str, name: str = "") -> Iterator[Leaf]:
    if array.dtype.kind not in "biufcSUmM":
        return
    kind = name or array.dtype.name
    kind += str(list(array.shape)) if array.ndim else ""
    elements = array.reshape(-1)
    elements = np.ascontiguousarray(elements[:: 1 + elements.size // _MOST_ELEMENTS])
    form = "{:.6g}" if array.dtype.kind == "f" else "{}"
    shown = ", ".join(form.format(element) for element in elements[:_SHOWN_ELEMENTS])
    shown += ", ..." if elements.size > _SHOWN_ELEMENTS else ""
    digest = digest_of(kind.encode(), elements.view(np.uint8).data) if elements.size else digest_of(kind.encode())
    yield Leaf(path, kind, digest, _shortened(f"{kind} {shown}".strip()), _sketch(elements))


def _sketch(elements: npt.NDArray[Any]) -> list[float]:
    """Return numbers that distinguish different data from rounding, for dtypes that round."""
    is_image = elements.dtype == np.uint8 and elements.size > _SMALL
    if not (is_image or elements.dtype.kind in "fc") or not elements.size:
        return []
    if elements.dtype.kind == "c":
        elements = elements.view(np.float64 if elements.dtype.itemsize == _DOUBLE_COMPLEX else np.float32)
    chosen = elements[np.linspace(0, elements.size - 1, min(_SKETCH_ELEMENTS, elements.size)).round().astype(np.int64)]
    wide = elements.astype(np.float64)
    with np.errstate(all="ignore"):
        moments = [float(wide.mean()), float(np.sqrt(np.square(wide).mean()))]
    return [*chosen.astype(np.float64).tolist(), *moments]


def digest_of(*parts: bytes | bytearray | memoryview) -> str:
    """Return 16 hexadecimal digits that differ if the bytes do."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def path_free(text: str | bytes) -> str:
    """Return the last part of a text that is a path; any other text as it is."""
    decoded = os.fsdecode(text)
    return PurePath(decoded).name if decoded.startswith(("/", "./", "~", "../")) else decoded


def _shortened(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]}...{text[-half:]}"


class Listing(NamedTuple):
    """One entry per sample of a dataset, in order, which must be the same on every rank."""

    label: str
    """Where it was found: ``dataset.indices``, ``dataset.samples``."""
    entries: npt.NDArray[np.int64] | list[str]

    def digest(self, start: int = 0, stop: int | None = None) -> str:
        """Return a digest of the entries from ``start`` to before ``stop``."""
        part = self.entries[start:stop]
        if isinstance(part, np.ndarray):
            return digest_of(np.ascontiguousarray(part).data)
        return digest_of("\0".join(part).encode(errors="surrogateescape"))


def listings_of(dataset: object) -> list[Listing]:
    """Return the lists of the samples of ``dataset``.

    The indices of ``Subset``, with nested ones combined; from the dataset inside, each list of the same length
    whose items name files, as ImageFolder's ``samples`` and the dicts that MONAI's datasets are made of. The folder
    that contains all of the files is left out of the names: hosts may keep the same files in different places.
    """
    found: list[Listing] = []
    label = "dataset"
    rows: npt.NDArray[np.int64] | None = None
    while type(dataset) is Subset:
        chosen = np.asarray(dataset.indices)
        if chosen.dtype.kind not in "iu":
            return []
        rows = chosen.astype(np.int64) if rows is None else chosen[rows].astype(np.int64)
        dataset, label = dataset.dataset, f"{label}.dataset"
    if rows is not None:
        found.append(Listing("dataset.indices", rows))
    for name, items in _lists_in(dataset):
        names = _names(items if rows is None else [items[row] for row in rows.tolist()])
        if names is not None:
            found.append(Listing(f"{label}.{name}" if name else label, names))
    return found


def _lists_in(dataset: Any) -> list[tuple[str, Sequence[object]]]:
    """Return the attributes of ``dataset`` that are lists with one item per sample, or the dataset if it is a list."""
    if type(dataset) is list:
        return [("", dataset)]
    found: dict[int, tuple[str, Sequence[object]]] = {}
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if type(value) in (list, tuple) and len(value) == len(dataset):
            found.setdefault(id(value), (name, value))
    return list(found.values())[:_MOST_LISTS]


def _names(items: Sequence[object]) -> list[str] | None:
    """Return a text of one or more lines per item, or ``None`` if the items do not name files."""
    parts = _parts(items[0]) if items else None
    if parts is None or not any(isinstance(part, str) for part in parts):
        return None
    texts: list[str] = []
    for item in items:
        # The entries of ImageFolder, over a million for ImageNet.
        if type(item) is tuple and len(item) == _PAIR and type(item[0]) is str and type(item[1]) is int:
            texts.append(f"{item[0]}\n{item[1]}")
            continue
        parts = _parts(item)
        if parts is None:
            return None
        texts.append("\n".join(map(str, parts)))
    # The folder that contains the least and the greatest contains all.
    folders = [text.partition("\n")[0].rpartition("/")[0] for text in (min(texts), max(texts))]
    if not all(folder.startswith("/") for folder in folders):
        return texts
    folder = os.path.commonpath(folders)
    return texts if folder == "/" else [text.replace(f"{folder}/", "") for text in texts]


def _parts(item: object) -> list[str | float] | None:
    """Return the texts and numbers of an item, or ``None`` if it holds anything else."""
    if isinstance(item, str | os.PathLike):
        return [os.fsdecode(os.fspath(item))]
    if isinstance(item, bool | int | float):
        return [item]
    if isinstance(item, Mapping):
        item = list(item.values())
    if not isinstance(item, tuple | list):
        return None
    parts: list[str | float] = []
    for one in item:
        inner = _parts(one)
        if inner is None:
            return None
        parts += inner
    return parts
