# SPDX-License-Identifier: Apache-2.0
"""What a call does beside its result: attributes, globals, hooks and output that it changes.

A trial would do it twice, and a split call with a part of the batch only. So the call that runs whole is looked at
first, and a module that does anything but compute is not split.
"""

from __future__ import annotations

import logging
import random
import sys
import zlib
from collections import ChainMap, UserDict, deque
from collections.abc import Mapping
from contextlib import contextmanager
from io import BytesIO, StringIO
from itertools import count
from types import CellType, FunctionType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from rankwise.tools.auto.caller import is_of_script
from rankwise.tools.auto.proof import PLAIN
from rankwise.tools.replacing import replaced
from rankwise.torch_private.autograd import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

LARGEST = 1000
"""Entries of a container that are looked at; of a larger one only their number."""
DEEPEST = 4
MOST_FACTS = 10_000
"""That are looked at of one attribute or global, such as a data set: it is done twice for each call that runs whole."""
LARGE_BYTES = 2**26
"""Of a larger array, which may be a file of any size, only the shape is looked at."""
_OF_TORCH = frozenset(vars(nn.Module()))


class Effects:
    """What one call has done that can be seen while it does it."""

    def __init__(self) -> None:
        self.found: str | None = None
        """In words that follow a colon."""

    @contextmanager
    def noted(self) -> Generator[None]:
        """Note output and hooks on tensors inside the block."""
        with replaced(
            (sys, ["stdout", "stderr"], lambda stream: _Noting(stream, self)),
            (logging.Logger, ["handle"], self._noting_logs),
            (torch.Tensor, ["register_hook", "register_post_accumulate_grad_hook", "retain_grad"], self._noting),
        ):
            yield

    def note(self, text: str) -> None:
        """Note an effect, if it is the first one."""
        self.found = self.found or text

    def _noting_logs(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.note("it logs")
            return handle(*args, **kwargs)

        return call

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(f"it calls Tensor.{method.__name__}, which would see a part of the batch")
            return method(*args, **kwargs)

        return call


class _Noting:
    """A stream that notes that it is written to."""

    def __init__(self, stream: Any, effects: Effects) -> None:
        self._stream = stream
        self._effects = effects

    def write(self, text: str) -> int:
        """Write, and note it."""
        self._effects.note("it prints")
        return int(self._stream.write(text) or 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def python_state(module: nn.Module) -> dict[str, object]:
    """Return what a call of ``module`` could change in Python, by name: attributes, of its classes too, and globals.

    Tensors that are attributes of modules are left out.
    """
    found: dict[str, object] = {}
    seen: set[int] = set()
    parts = list(module.named_modules())
    for name, part in parts:
        for key, value in vars(part).items():
            if key not in _OF_TORCH and not isinstance(value, torch.Tensor):
                _look(f"{name}.{key}" if name else f".{key}", value, found, seen)
    kinds = {kind for _, part in parts for kind in type(part).__mro__ if _is_of_user(kind)}
    for kind in kinds:
        _look(kind.__name__, kind, found, seen)
    of_kinds = {"__main__", *(kind.__module__ for kind in kinds)}
    for name, loaded in sorted(sys.modules.copy().items()):
        if name == "__mp_main__" or not is_of_script(name):
            continue
        beside = "" if name in of_kinds else f" of {name}"
        for key, value in list(vars(loaded).items()):
            if not key.startswith("__"):
                _look(f"the global {key}{beside}", value, found, seen)
    return found


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> str | None:
    """Return the name of what differs between two states, if anything does."""
    for name in (*after, *before):
        if name not in before or name not in after or before[name] != after[name]:
            return name
    return None


def _look(name: str, value: object, found: dict[str, object], seen: set[int]) -> None:
    """Add the facts of a value to ``found``, by name."""
    own: dict[str, object] = {}
    _add(name, value, own, seen, DEEPEST)
    found.update(own)


def _add(name: str, value: object, found: dict[str, object], seen: set[int], depth: int) -> None:
    fact = _fact_of(value)
    if fact is not None:
        found[name] = fact
        return
    if depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    try:
        parts = list(_within(value))
    except Exception:  # noqa: BLE001 - whatever an object of the script raises when it is looked at
        return
    for key, inner in parts:
        if len(found) >= MOST_FACTS:
            return
        _add(f"{name}{key}", inner, found, seen, depth - 1)


def _fact_of(value: object) -> object:
    """Return what can be compared later, for a value without parts."""
    if isinstance(value, (*PLAIN, np.generic)):
        return text_of(value)
    if isinstance(value, torch.Tensor):
        return _Tensor(value)
    if isinstance(value, np.ndarray):
        return _fact_of_array(value)
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, StringIO | BytesIO):
        return None if value.closed else value.getvalue()
    if isinstance(value, count):
        return repr(value)
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())  # its text leaves out the middle
    return repr(value.getstate()) if isinstance(value, random.Random) else None


def _fact_of_array(array: np.ndarray[Any, Any]) -> object:
    if array.nbytes > LARGE_BYTES:
        return array.shape
    return array.shape, repr(array) if array.dtype == object else zlib.crc32(array.tobytes())


def text_of(value: object) -> str:
    """Return the text of a plain value, however large."""
    # Python writes no decimal number of more than 4,300 digits.
    return f"{type(value).__name__} {value:x}" if isinstance(value, int) else repr(value)


class _Tensor:
    """A tensor, as it is now."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._num_changes = 0 if tensor.is_inference() else version_of(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Tensor):
            return False
        return self._tensor is other._tensor and self._num_changes == other._num_changes

    def __hash__(self) -> int:
        return id(self._tensor)


_MAPPINGS = (dict, ChainMap, MappingProxyType, UserDict)


def _within(value: object) -> Iterable[tuple[str, object]]:
    """Yield the parts of a value, and names for them."""
    # Not those of libraries: an HDF5 file is one, and fails once it is closed.
    if isinstance(value, _MAPPINGS) or (isinstance(value, Mapping) and _is_of_user(type(value))):
        yield "", len(value)
        if len(value) <= LARGEST:
            yield from ((f"[{key!r}]", inner) for key, inner in list(value.items()))
    elif isinstance(value, list | tuple | deque):
        yield "", len(value)
        if len(value) <= LARGEST:
            yield from ((f"[{number}]", inner) for number, inner in enumerate(list(value)))
    elif isinstance(value, set | frozenset):
        yield "", repr(sorted(map(text_of, value))) if len(value) <= LARGEST else len(value)
    else:
        yield from _attributes(value)


def _attributes(value: object) -> Iterable[tuple[str, object]]:
    """Yield what the script has set on its own classes, functions and objects, and what its functions close over."""
    if isinstance(value, type):
        if _is_of_user(value):
            yield from ((f".{key}", inner) for key, inner in list(vars(value).items()) if not key.startswith("__"))
    elif isinstance(value, FunctionType):
        if is_of_script(value.__module__):
            yield from ((f".{key}", inner) for key, inner in list(vars(value).items()))
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            yield from ((f" and its {key}", inner) for key, cell in cells for inner in _content_of(cell))
    elif _is_of_user(type(value)) and not isinstance(value, nn.Module | ModuleType):
        yield from ((f".{key}", inner) for key, inner in list(getattr(value, "__dict__", {}).items()))


def _content_of(cell: CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


def _is_of_user(kind: type) -> bool:
    """Return whether a class is the script's, not a library's."""
    return is_of_script(kind.__module__)
