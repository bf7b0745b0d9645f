# SPDX-License-Identifier: Apache-2.0
"""What of a value can be compared later, and the comparison. No ``==`` of a script or a library is called."""

from __future__ import annotations

import functools
import random
import weakref
from collections import deque
from io import BytesIO, StringIO
from itertools import chain, count
from operator import attrgetter, call, contains
from types import BuiltinMethodType, MemberDescriptorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rankwise.auto.proof import PLAIN
from rankwise.torch_private.autograd import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

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
OF_PARAMETER: tuple[Callable[[torch.Tensor], object], ...] = (
    attrgetter("dtype"),
    attrgetter("requires_grad"),
    attrgetter("shape"),
    torch.Tensor.get_device,
)
_DECIDING = (bool, str, type(None), None)
_LENGTHS: Any = tuple((kind, kind.__len__) for kind in (dict, list, tuple, deque, set, frozenset))
_COMPARED_BYTES = 2**18
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
    return is_plain and tensor.nbytes <= _COMPARED_BYTES


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


class Watched:
    """What calls of a module read, compared at every call.

    Its fields are one table: what is looked at in one way lies in one list, so that a call compares it in one go.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # it must not keep the module itself
        self._parts = list(module.modules())[1:]
        self.views: list[Iterable[object]] = []
        """What they iterate over must be the same objects."""
        self.getters: list[tuple[Callable[[Any], Any], object]] = []
        """As must what the first returns for the second."""
        self.sized: list[Any] = []
        self.empty: list[Any] = []
        self.parameters: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        """Of which torch counts the changes."""
        self.contents: list[tuple[Callable[[Any], object], object]] = []

    def remember(self, absent: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        """Compare with what there is now; ``absent`` are names that namespaces must not get."""
        self._absent = tuple(zip(*absent, strict=True)) or ((), ())
        self._read_by = tuple(zip(*self.getters, strict=True)) or ((), ())
        self._values = list(self._live())  # keeps them alive: their ids are not given to others
        self._ids = np.fromiter(self._values, object).tobytes()
        self._saved_states = self._states()

    def are_unchanged(self) -> bool:
        """Return whether all is as it was, or holds equal plain values."""
        try:
            return (
                (np.fromiter(self._live(), object).tobytes() == self._ids or self._are_equal())
                and not any(self.empty)
                and not any(map(contains, *self._absent))
                and self._states() == self._saved_states
            )
        except Exception:  # noqa: BLE001 - whatever an object of the script raises when it is looked at
            return False

    def _live(self) -> Iterable[object]:
        """Iterate over everything of which it matters that it is the same object."""
        return chain(
            (type(self._module()),),
            chain.from_iterable(self.views),
            map(type, self._parts),
            chain.from_iterable(map(call, *self._read_by)),
        )

    def _states(self) -> list[object]:
        return [
            list(map(len, self.sized)),
            *(list(map(fact, self.parameters)) for fact in OF_PARAMETER),
            list(map(version_of, self.tensors)),
            [content(one) for content, one in self.contents],
        ]

    def _are_equal(self) -> bool:
        live = list(self._live())
        pairs = ((one, two) for one, two in zip(live, self._values, strict=True) if one is not two)
        if len(live) != len(self._values) or any(plain(one) is None or plain(one) != plain(two) for one, two in pairs):
            return False
        self._values, self._ids = live, np.fromiter(live, object).tobytes()
        return True
