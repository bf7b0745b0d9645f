# SPDX-License-Identifier: Apache-2.0
"""What of a value can be compared later. No ``==`` of a script or a library is called."""

from __future__ import annotations

import functools
import random
from collections import deque
from io import BytesIO, StringIO
from itertools import count
from types import BuiltinMethodType, MemberDescriptorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rankwise.auto.proof import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    Kinds = type | tuple[type, ...]

CONTENTS: tuple[tuple[Kinds, Callable[[Any], object]], ...] = (
    (np.ndarray, lambda one: (one.dtype.str, one.shape, one.tobytes())),
    (bytearray, bytes),
    ((StringIO, BytesIO), lambda one: None if one.closed else one.getvalue()),
    (count, repr),
    (random.Random, lambda one: one.getstate()),
    (np.random.Generator, lambda one: repr(one.bit_generator.state)),
    (np.random.RandomState, lambda one: repr(one.get_state())),
    (torch.Generator, lambda one: bytes(one.get_state().numpy())),  # its text leaves out the middle
)
"""Functions that return what is compared of objects whose parts cannot be looked at, by type."""
SHARED_GENERATORS: tuple[Any, ...] = (
    getattr(random.random, "__self__", None),
    np.random.rand.__self__,
    torch.default_generator,
)
"""Those of Python, NumPy and torch."""
WITHIN: tuple[tuple[Kinds, tuple[str, ...]], ...] = (
    (MethodType, ("__func__", "__self__")),
    (BuiltinMethodType, ("__self__",)),  # of a class that is written in Python, such as a torch.autograd.Function
    (functools.partial, ("func", "args", "keywords")),
    ((staticmethod, classmethod), ("__func__",)),
    (property, ("fget", "fset")),
    (functools.cached_property, ("func",)),
    (type(functools.cache(len)), ("__wrapped__",)),
)
"""The attributes that matter of objects that stand for functions, by type."""
_DECIDING = (bool, str, type(None), None)
_LENGTHS: Any = tuple((kind, kind.__len__) for kind in (dict, list, tuple, deque, set, frozenset))
_SMALL_BYTES = 2**18
_BYTES_OF_VALUE = 128
"""Bytes of an array that take as long to compare as one value."""
_OF_DATA = frozenset({"argparse", "collections", "types"})
"""Python modules of classes whose objects are nothing but their attributes."""


class Is:
    """An object that is compared by what it is."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Is) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)

    @property
    def is_data(self) -> bool:
        """Whether it is no code, and nothing that is made of parts that run."""
        return not (callable(self._value) or isinstance(self._value, ModuleType))


def is_of_numbers(fact: object) -> bool:
    """Return whether what is compared are numbers, not code, flags or texts, which decide."""
    if isinstance(fact, list | tuple):
        return all(map(is_of_numbers, fact))
    return fact.is_data if isinstance(fact, Is) else fact not in _DECIDING


def plain(value: object) -> object:
    """Return what can be compared of a plain value; of any other ``None``."""
    kind = type(value)
    if kind is float or kind is complex:
        return kind, repr(value)  # no NaN is equal to itself
    if kind in PLAIN:
        return kind, value
    return (kind, value.tobytes()) if isinstance(value, np.generic) else None


def by_type(table: tuple[tuple[Kinds, Any], ...], value: object) -> Any:
    """Return what a table has for a value, ``None`` if nothing."""
    return next((found for kinds, found in table if isinstance(value, kinds)), None)


def size_of(value: object) -> int:
    """Return how much there is to compare of a value, without what its parts hold."""
    if isinstance(value, np.ndarray):
        is_fixed = not value.flags.writeable and not isinstance(value.base, np.ndarray)
        return 0 if is_fixed else value.nbytes // _BYTES_OF_VALUE
    length = by_type(_LENGTHS, value)
    return 1 if length is None else length(value)


def is_small(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor are compared, however they are written; of others what torch counts."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    return is_plain and tensor.nbytes <= _SMALL_BYTES


def values_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the values of a small tensor."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def is_data(kind: type) -> bool:
    """Return whether objects of a class of the standard library are nothing but their attributes."""
    return kind.__module__ in _OF_DATA


def keeps_to_attributes(kind: type) -> bool:
    """Return whether objects of a class are pickled by their attributes, and not as a logger by its name."""
    return kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__


def slots_of(value: object) -> list[str]:
    """Return the names of the attributes of an object that lie in slots."""
    kinds = type(value).__mro__
    return [
        key
        for kind in kinds
        for key, slot in vars(kind).items()
        if isinstance(slot, MemberDescriptorType) and hasattr(value, key)
    ]
