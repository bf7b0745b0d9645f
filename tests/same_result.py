# SPDX-License-Identifier: Apache-2.0
"""What two runs of a script printed and wrote, compared: equal text, and numbers that agree to a tolerance.

Text that is no number must be equal, as must whole numbers; of times of day, as logs and names of folders have them,
only the place counts.
Tensors and arrays are compared by the largest difference, relative to the largest value.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import re
import sqlite3
import types
import warnings
import weakref
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOISE = 1e-13
"""Rounding leaves up to this where a sum cancels, as in the gradient of a bias before BatchNorm."""
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|\b(?:nan|inf)\b")
STAMP = re.compile(r"\d{8}[-_]\d{6}(?:[-_]\d{6})?")
TIME_OF_DAY = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?")


@dataclass(frozen=True)
class Result:
    """What a run left: its exit code, what it printed, and its folder."""

    code: int
    stdout: str
    folder: Path


def differences(expected: Result, found: Result, tolerance: float = 1e-10) -> list[str]:
    """Return what differs between two runs, each in a sentence; nothing if they agree."""
    said: list[str] = []
    if expected.code != found.code:
        said.append(f"exit code: {expected.code} and {found.code}")
    said += (f"stdout, {line}" for line in _of_texts(expected.stdout, found.stdout, tolerance))
    ours, theirs = _paths(expected.folder), _paths(found.folder)
    said += (f"{name}: missing" for name in sorted(ours.keys() - theirs.keys()))
    said += (f"{name}: not written by the first run" for name in sorted(theirs.keys() - ours.keys()))
    for name in sorted(ours.keys() & theirs.keys()):
        one, other = ours[name], theirs[name]
        if one.is_dir() != other.is_dir():
            said.append(f"{name}: a folder and a file")
        elif one.is_file() and one.read_bytes() != other.read_bytes():
            said += (f"{name}, {line}" for line in _of_files(one, other, tolerance))
    return said


def _paths(folder: Path) -> dict[str, Path]:
    """Return files and folders by name, without the times in names, nor what Python keeps of compiled modules."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        name = STAMP.sub("TIME", str(path.relative_to(folder)))
        while name in found:
            name += "~"
        if "__pycache__" not in name:
            found[name] = path
    return found


def _of_texts(one: str, other: str, tolerance: float) -> Iterator[str]:
    lines, others = one.splitlines(), other.splitlines()
    if len(lines) != len(others):
        yield f"{len(lines)} and {len(others)} lines"
    for number, (mine, theirs) in enumerate(zip(lines, others, strict=False), 1):
        if mine != theirs and not _is_same_line(mine, theirs, tolerance):
            yield f"line {number}: {mine!r} and {theirs!r}"


def _is_same_line(one: str, other: str, tolerance: float) -> bool:
    one, other = (TIME_OF_DAY.sub("TIME", line) for line in (one, other))
    if NUMBER.sub("0", one) != NUMBER.sub("0", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(_is_same_number(mine, theirs, tolerance) for mine, theirs in pairs)


def _is_same_number(one: str, other: str, tolerance: float) -> bool:
    """Compare two numbers as they were printed; those without a point or an exponent must be equal."""
    if one == other:
        return True
    return (one + other).strip("+-0123456789") != "" and _is_close(float(one), float(other), tolerance)


def _is_close(one: float, other: float, tolerance: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=NOISE)


def _of_files(one: Path, other: Path, tolerance: float) -> Iterator[str]:
    mine, theirs = _content(one), _content(other)
    if isinstance(mine, str) and isinstance(theirs, str):
        yield from _of_texts(mine, theirs, tolerance)
        return
    for (where, part), (place, their_part) in zip(_parts("content", mine), _parts("content", theirs), strict=False):
        words = _of_parts(part, their_part, tolerance) if where == place else f"beside {place}"
        if words:
            yield f"{where}: {words}"
            if isinstance(part, _Made) or where != place:
                return


def _content(path: Path) -> Any:
    """Return what a file holds: tensors, arrays, pickled objects, text or bytes."""
    import numpy as np
    import torch

    raw = path.read_bytes()
    if zipfile.is_zipfile(path):
        archive = zipfile.ZipFile(path)
        names = archive.namelist()
        if any(name.endswith(".npy") for name in names):
            return dict(np.load(path, allow_pickle=True))
        if any("/code/" in name for name in names):
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # scripts still use it
                return torch.jit.load(path).state_dict()
        if any(name.endswith("data.pkl") for name in names):
            return torch.load(path, weights_only=False, pickle_module=_PICKLE)
        return {name: archive.read(name) for name in names}
    if raw.startswith(b"SQLite"):
        with contextlib.closing(sqlite3.connect(path)) as database:
            return "\n".join(database.iterdump())
    if raw.startswith(b"\x93NUMPY"):
        return np.load(path, allow_pickle=True)
    if raw.startswith(b"\x80"):
        return _Unpickler(io.BytesIO(raw)).load()
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


class _Unpickler(pickle.Unpickler):
    """Reads objects of the script's own classes, too, which are not to be had here."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (), {}) if module == "__main__" else super().find_class(module, name)


_PICKLE = types.ModuleType("pickle of any class")
_PICKLE.__dict__.update(Unpickler=_Unpickler, load=pickle.load)


@dataclass(frozen=True)
class _Made:
    """What a value is, before its parts."""

    of: str


def _parts(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the place of each part of a value, and the part: numbers, texts, arrays of tensors."""
    import torch

    if isinstance(value, weakref.ref):  # LSTM and its like hold their parameters by such
        yield from _parts(where, value())
    elif isinstance(value, torch.Tensor):
        yield where, _Made(f"{value.dtype} {list(value.shape)}, requires_grad={value.requires_grad}")
        dense = value.detach().to_dense()
        yield where, (dense.double() if dense.is_floating_point() else dense).numpy()
    elif isinstance(value, dict):
        yield where, _Made(f"{type(value).__name__} of {list(value)}")
        for key, part in value.items():
            yield from _parts(f"{where}[{key!r}]", part)
    elif isinstance(value, list | tuple):
        yield where, _Made(f"{type(value).__name__} of {len(value)}")
        for index, part in enumerate(value):
            yield from _parts(f"{where}[{index}]", part)
    elif hasattr(value, "__dict__") and not callable(vars(type(value)).get("__eq__")):
        yield where, _Made(type(value).__name__)
        yield from _parts(f"{where}.__dict__", vars(value))
    else:
        yield where, value


def _of_parts(one: Any, other: Any, tolerance: float) -> str | None:
    import numpy as np

    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return _of_arrays(one, other, tolerance)
    both_floats = isinstance(one, float) and isinstance(other, float)
    is_same = _is_close(one, other, tolerance) if both_floats else type(one) is type(other) and one == other
    return None if is_same else f"{one} and {other}"


def _of_arrays(one: Any, other: Any, tolerance: float) -> str | None:
    import numpy as np

    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype} {one.shape} and {other.dtype} {other.shape}"
    if not np.issubdtype(one.dtype, np.floating):
        return None if np.array_equal(one, other) else "other values"
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True) or not np.isfinite(other[finite]).all():
        return "other values that are not finite"
    largest = float(np.abs(one[finite]).max(initial=0))
    difference = float(np.abs(one[finite] - other[finite]).max(initial=0))
    is_same = difference <= tolerance * largest + NOISE
    return None if is_same else f"{difference:.3g} apart, of values up to {largest:.3g}"
