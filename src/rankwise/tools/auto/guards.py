# SPDX-License-Identifier: Apache-2.0
"""What a call of a module may read, compared before every call: the copies on other ranks are never stale.

Read is what the parts of the module hold, and what the names in their code stand for: globals, closures, defaults,
attributes of classes and Python modules. Code of the script is followed by its names, also where it does not run; code
of libraries once it has run. Of parameters and buffers it is not the values. Objects of libraries that are written in C,
beside those of torch and NumPy, count as what they are, without what is in them.
"""

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections import deque
from dataclasses import dataclass
from io import BytesIO, StringIO
from itertools import chain, count
from operator import attrgetter, call, contains, itemgetter
from types import FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import nn

from rankwise.tools.auto.caller import is_of_script
from rankwise.tools.auto.code_reads import functions_of, names_of
from rankwise.tools.auto.proof import PLAIN
from rankwise.torch_private.autograd import version_of
from rankwise.torch_private.modules import (
    call_of_modules,
    hook_tables,
    own_buffers,
    own_modules,
    own_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import CellType, CodeType

    from rankwise.tools.auto.code_reads import Ran

MOST_VALUES = 10_000
"""That are compared of one attribute or global: more would take longer than a call may."""
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_CALLED_UNNAMED = frozenset({"forward", "backward", "setup_context"})
_FACTS_OF_PARAMETERS: tuple[Callable[[torch.Tensor], object], ...] = (
    attrgetter("dtype"),
    attrgetter("requires_grad"),
    attrgetter("shape"),
    torch.Tensor.get_device,
)
_CONTENTS: tuple[tuple[type | tuple[type, ...], Callable[[Any], object]], ...] = (
    (np.ndarray, lambda one: (one.dtype.str, one.shape, one.tobytes())),
    (bytearray, bytes),
    ((StringIO, BytesIO), lambda one: None if one.closed else one.getvalue()),
    (count, repr),
    (random.Random, lambda one: one.getstate()),
    (np.random.Generator, lambda one: repr(one.bit_generator.state)),
    (np.random.RandomState, lambda one: repr(one.get_state())),
    (torch.Generator, lambda one: bytes(one.get_state().numpy())),  # its text leaves out the middle
)
"""What is compared of objects that cannot be looked into, by their type."""


class Guard:
    """What calls of one module may read, as it was when the guard was made.

    It holds what it compares: an owner that must not keep the module alive keeps the guard no longer than the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._ran: Ran = {}
        self._functions: list[FunctionType] = []
        self._change: str | None = None
        self._now = _Reads(module, self._ran, [])

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Return the guard of a module as it is now."""
        return cls(module)

    def renewed(self) -> Guard:
        """Return the guard of the same module as it is now, of the same code."""
        module = self._module()
        if module is None:
            return self
        guard = Guard(module)
        guard.add(self._ran)
        return guard

    @property
    def obstacle(self) -> str | None:
        """Why something that a call may read cannot be compared, in words that follow the module's name."""
        return self._now.obstacle

    def add(self, ran: Ran) -> None:
        """Compare also what code reads that has run in a call. A change until now stays one."""
        self._change = self.changed()
        new = {key: one for key, one in ran.items() if key not in self._ran}
        module = self._module()
        if not new or module is None:
            return
        self._ran |= new
        unknown = [code for code, _ in new.values() if code.co_freevars and id(code) not in self._now.codes]
        self._functions += functions_of(unknown)
        self._now = _Reads(module, self._ran, self._functions)

    def changed(self) -> str | None:
        """Return the name of the first thing that is not as it was, if anything is."""
        module = self._module()
        if self._change is not None or module is None or self._now.are_unchanged():
            return self._change
        now = _Reads(module, self._ran, self._functions)
        before, after = self._now.facts, now.facts
        for name in (*after, *before):
            if name not in before or name not in after or before[name] != after[name]:
                return name
        self._now = now  # equal values, which are other objects
        return None


class _Is:
    """An object that is compared by what it is, whatever its ``==`` does."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


@dataclass(slots=True)
class _Space:
    """A namespace whose names code reads: of globals, a class or a Python module."""

    words: str
    """Before and after a name in it, with a ``{}`` between."""
    names: Mapping[str, Any]
    read: set[str]
    stored: set[str]
    has_attributes: bool
    """Whether attributes are read in it that code names."""


@dataclass(slots=True)
class _Root:
    """An attribute or a global, in which values are looked for."""

    name: str
    is_named: bool
    num_left: int = MOST_VALUES


class _Reads:
    """What calls of a module read, now."""

    def __init__(self, module: nn.Module, ran: Ran, functions: list[FunctionType]) -> None:
        self.facts: dict[str, object] = {}
        """By name; to be compared by ``==``."""
        self.obstacle: str | None = None
        self.codes: dict[int, CodeType] = {}
        self._views: list[Iterable[object]] = []
        self._getters: list[tuple[Callable[[Any], Any], object]] = []
        self._empty: list[Any] = []
        self._parameters: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []
        self._contents: list[tuple[Callable[[Any], object], object]] = []
        self._spaces: dict[int, _Space] = {}
        self._attributes: set[str] = set()
        self._stored_attributes: set[str] = set()
        self._is_of_script: dict[str, bool] = {}
        self._seen: dict[int, object] = {}
        self._pending: deque[tuple[str, object, _Root]] = deque()
        self._unnamed: list[tuple[str, str, object]] = []

        self._parts = {id(part): part for part in module.modules()}
        self._seen.update(self._parts)
        kinds = dict.fromkeys(kind for part in self._parts.values() for kind in type(part).__mro__)
        self._beside = {"__main__", *(kind.__module__ for kind in kinds if self._is_user(kind.__module__))}
        for name, part in module.named_modules():
            self._read_part(name, part, type(module).__name__)
        for kind in kinds:
            self._read_class(kind)
        self._follow("the call of modules", call_of_modules())
        for code, names in ran.values():
            self._read_code(code, names)
        self._settle()
        for function in functions:
            if id(function) not in self._seen:
                self._follow(function.__qualname__, function)
        self._settle()
        for name, _, value in self._unnamed:
            self._look(name, value, is_named=False)
        self._look_into_pending()
        self._remember()

    # -- comparing, at every call ------------------------------------------------------------------

    def are_unchanged(self) -> bool:
        """Return whether all is as it was, or holds equal plain values."""
        try:
            return (
                (np.fromiter(self._live(), object).tobytes() == self._ids or self._are_equal())
                and not any(self._empty)
                and not any(map(contains, *self._absent))
                and self._states() == self._saved_states
            )
        except Exception:  # noqa: BLE001 - whatever an object of the script raises when it is looked at
            return False

    def _live(self) -> Iterable[object]:
        """Iterate over everything of which it matters that it is the same object."""
        return chain(
            chain.from_iterable(self._views),
            map(type, self._parts.values()),
            chain.from_iterable(map(call, *self._read_by)),
        )

    def _states(self) -> list[object]:
        return [
            *(list(map(fact, self._parameters)) for fact in _FACTS_OF_PARAMETERS),
            list(map(version_of, self._tensors)),
            [content(one) for content, one in self._contents],
        ]

    def _are_equal(self) -> bool:
        live = list(self._live())
        if len(live) != len(self._values):
            return False
        if any(
            one is not two and (_plain(one) is None or _plain(one) != _plain(two))
            for one, two in zip(live, self._values, strict=True)
        ):
            return False
        self._values, self._ids = live, np.fromiter(live, object).tobytes()
        return True

    def _remember(self) -> None:
        spaces = list(self._spaces.values())
        for one in spaces:
            if one.read:
                # A single name would be returned without a tuple.
                self._getters.append((itemgetter(*one.read, next(iter(one.read))), one.names))
            if one.has_attributes and isinstance(one.names, dict):
                one.stored |= self._stored_attributes
        absent = [(one.names, name) for one in spaces for name in one.stored - one.names.keys()]
        self._absent = tuple(zip(*absent, strict=True)) or ((), ())
        self._read_by = tuple(zip(*self._getters, strict=True)) or ((), ())
        self._values = list(self._live())
        self._ids = np.fromiter(self._values, object).tobytes()
        self._saved_states = self._states()

    # -- parts of the module -----------------------------------------------------------------------

    def _read_part(self, name: str, part: nn.Module, title: str) -> None:
        title, attributes = name or title, vars(part)
        self.facts[f"the class of {title}"] = _Is(type(part))
        if isinstance(part, torch.jit.ScriptModule):
            self.obstacle = f"{title} is compiled by torch.jit"
            return
        tables = own_parameters(part), own_buffers(part), own_modules(part), *hook_tables(part)
        for table in tables:
            (self._views.append(table.values()) if table else self._empty.append(table))
        for key, one in chain.from_iterable(table.items() for table in tables[:3]):
            is_tensor = isinstance(one, torch.Tensor)
            self.facts[f"{name}.{key}"] = (_Is(one), *(fact(one) for fact in _FACTS_OF_PARAMETERS if is_tensor))
            if is_tensor and id(one) not in self._seen:
                self._seen[id(one)] = one
                if isinstance(one, nn.Parameter):  # a buffer that gets another dtype is another tensor
                    self._parameters.append(one)
        hooks = [hook for table in tables[3:] for hook in table.values()]
        self.facts[f"a hook of {title}"] = tuple(map(_Is, hooks))
        for number, hook in enumerate(hooks):
            self._look(f"hook {number} of {title}", hook)
        # As pruning and weight_norm do before each call: their tensors are made of parameters.
        is_computed = any(type(hook).__module__.startswith("torch.nn.utils.") for hook in tables[4].values())
        kept = {key: one for key, one in attributes.items() if not (is_computed and isinstance(one, torch.Tensor))}
        if is_computed:
            self._getters.append((itemgetter(*kept), attributes))
        else:
            self._views.append(attributes.values())
        self._unnamed += [(f"{name}.{key}", key, one) for key, one in kept.items() if key not in _OF_TORCH]

    # -- names in code -----------------------------------------------------------------------------

    def _settle(self) -> None:
        """Look at what code names, until that names nothing else."""
        known = -1
        while known != len(self._seen) + len(self._attributes):
            known = len(self._seen) + len(self._attributes)
            self._look_into_pending()
            for space in list(self._spaces.values()):
                if space.has_attributes:
                    self._read(space, self._attributes | _CALLED_UNNAMED)
            waiting, self._unnamed = self._unnamed, []
            for name, key, value in waiting:
                if key in self._attributes or key in _CALLED_UNNAMED or _is_dunder(key):
                    self._look(name, value)
                else:
                    self._unnamed.append((name, key, value))

    def _read_code(self, code: CodeType, names: dict[str, Any]) -> None:
        self.codes[id(code)] = code
        found, space = names_of(code), self._space_of(names)
        self._attributes |= found.attributes
        self._stored_attributes |= found.stored_attributes
        space.stored |= found.stored_globals
        self._read(space, found.globals)
        for first, *others in found.chains:
            owner = names.get(first)
            for key in others:
                if not isinstance(owner, ModuleType):
                    break
                self._read(self._space_of(vars(owner)), {key})
                owner = vars(owner).get(key)
        for name in found.imported & sys.modules.keys():
            self._space_of(vars(sys.modules[name])).has_attributes = True

    def _space_of(self, names: dict[str, Any]) -> _Space:
        """Return the namespace of a Python module."""
        name = str(names.get("__name__"))
        words = "the global {}" + ("" if name in self._beside else f" of {name}")
        return self._spaces.setdefault(id(names), _Space(words, names, set(), set(), has_attributes=False))

    def _read(self, space: _Space, names: set[str] | frozenset[str]) -> None:
        for key in sorted(names & space.names.keys() - space.read):
            space.read.add(key)
            self._look(space.words.format(key), space.names[key])

    def _read_class(self, kind: type) -> None:
        """Look at what a class holds: all of it if it is the script's, otherwise what code names."""
        if id(kind) in self._spaces:
            return
        names = vars(kind)
        space = _Space(f"{kind.__name__}.{{}}", names, set(), set(), has_attributes=True)
        self._spaces[id(kind)] = space
        self._seen[id(kind)] = kind
        if self._is_user(kind.__module__):
            space.has_attributes = False
            self._views += [names.keys(), names.values()]
            self._unnamed += [
                (f"{kind.__name__}.{key}", key, one)
                for key, one in list(names.items())
                if not _is_dunder(key) or (isinstance(one, FunctionType) and key != "__init__")
            ]

    def _follow(self, name: str, function: FunctionType) -> None:
        """Look at what a function reads; of one of a library that has not run, only at functions it stands for."""
        self._seen[id(function)] = function
        code, home = function.__code__, str(function.__globals__.get("__name__"))
        is_followed = (
            self._is_user(home)
            or id(code) in self.codes
            or function is call_of_modules()
            or (home.startswith("torch.nn.modules.") and home != nn.Module.__module__)
        )
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            for one in _content_of(cell):
                if is_followed:
                    self._getters.append((_CONTENT, cell))
                if is_followed or isinstance(one, FunctionType | MethodType):
                    self._look(f"{name} and its {key}", one)
        if not is_followed:
            return
        self._read_code(code, function.__globals__)
        self.facts[f"the code of {name}"] = _Is(code)
        self._getters.append((_OF_FUNCTION, function))
        for number, one in enumerate(function.__defaults__ or ()):
            self._look(f"default {number} of {name}", one)
        self._look(f"a default of {name}", function.__kwdefaults__)
        self._look_into(name, vars(function), ".{}", _Root(name, is_named=True))

    # -- values ------------------------------------------------------------------------------------

    def _look(self, name: str, value: object, *, is_named: bool = True) -> None:
        self._pending.append((name, value, _Root(name, is_named)))

    def _look_into_pending(self) -> None:
        while self._pending:
            name, value, root = self._pending.popleft()
            try:
                self._look_at(name, value, root)
            except Exception:  # noqa: BLE001 - whatever an object of the script raises when it is looked at
                self.facts[name] = _Is(value)

    def _look_at(self, name: str, value: Any, root: _Root) -> None:
        plain, size = _plain(value), _size_of(value)
        if plain is not None:
            self.facts[name] = plain
            root.num_left -= 1
            return
        is_known = id(value) in self._seen
        self._seen[id(value)] = value
        self.facts[name] = _Is(value)
        if size > root.num_left:
            if root.is_named:
                self.obstacle = self.obstacle or f"it may read more of {root.name} than can be compared at every call"
        elif not is_known:
            root.num_left -= size if isinstance(value, np.ndarray) else 1
            self._look_at_new(name, value, root)

    def _look_at_new(self, name: str, value: Any, root: _Root) -> None:
        if any(value is one for one in _SHARED_GENERATORS):
            return  # their states go with each call that draws
        content = next((read for kinds, read in _CONTENTS if isinstance(value, kinds)), None)
        within = next((names for kinds, names in _WITHIN if isinstance(value, kinds)), ())
        self._pending += [(f"{name}.{key.strip('_')}", getattr(value, key), root) for key in within]
        if isinstance(value, torch.Tensor):
            if not value.is_inference():
                self._tensors.append(value)
                self.facts[name] = _Is(value), version_of(value)
        elif content is not None:
            self._contents.append((content, value))
            self.facts[name] = content(value)
            if isinstance(value, np.ndarray) and value.dtype == object:
                self._pending += [(f"{name}[{number}]", one, root) for number, one in enumerate(value.ravel().tolist())]
        elif isinstance(value, FunctionType):
            self._follow(name, value)
        elif isinstance(value, ModuleType):
            self._space_of(vars(value)).has_attributes |= self._is_user(value.__name__)
        elif isinstance(value, type):
            self._read_classes(value)
        elif not within:
            self._look_at_object(name, value, root)

    def _look_at_object(self, name: str, value: Any, root: _Root) -> None:
        kind = type(value)
        if isinstance(value, dict | MappingProxyType):
            self.facts[name] = _Is(kind), len(value)
            self._look_into(name, value, "[{}]", root)
        elif isinstance(value, list | tuple | deque):
            self.facts[name] = _Is(kind), len(value)
            self._views += [] if isinstance(value, tuple) else [value]
            self._pending += [(f"{name}[{number}]", one, root) for number, one in enumerate(value)]
        elif isinstance(value, set | frozenset):
            self.facts[name] = _Is(kind), frozenset(_plain(one) or _Is(one) for one in value)
            self._views.append(value)
        # An object that is pickled in a way of its own, as a logger by its name, holds what it holds for itself.
        is_plain = kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__
        is_data = self._is_user(kind.__module__) or kind.__module__ in _OF_DATA or isinstance(value, nn.Module)
        if not is_data and not (is_plain and root.is_named):
            return
        self.facts.setdefault(name, _Is(kind))
        if isinstance(own := getattr(value, "__dict__", None), dict):
            self._look_into(name, own, ".{}", root)
        slots = [
            key for one in kind.__mro__ for key, slot in vars(one).items() if isinstance(slot, MemberDescriptorType)
        ]
        filled = [key for key in slots if hasattr(value, key)]
        if filled:
            self._getters.append((attrgetter(*filled, filled[0]), value))
            self._pending += [(f"{name}.{key}", getattr(value, key), root) for key in filled]
        self._read_classes(kind)

    def _look_into(self, name: str, names: Mapping[Any, Any], words: str, root: _Root) -> None:
        kind: Any = dict if isinstance(names, dict) else MappingProxyType
        self._views += [kind.keys(names), kind.values(names)]
        for number, (key, one) in enumerate(list(kind.items(names))):
            shown = f"{type(key).__name__} {number}" if _plain(key) is None else key if words == ".{}" else repr(key)
            self._pending.append((name + words.format(shown), one, root))

    def _read_classes(self, kind: type) -> None:
        if self._is_user(kind.__module__):
            for one in kind.__mro__[:-1]:
                self._read_class(one)

    def _is_user(self, name: str) -> bool:
        """Return whether a Python module is the script's."""
        if name not in self._is_of_script:
            self._is_of_script[name] = is_of_script(name)
        return self._is_of_script[name]


_SHARED_GENERATORS = (random.random.__self__, np.random.rand.__self__, torch.default_generator)  # type: ignore[attr-defined]
"""Those of Python, NumPy and torch."""
_BYTES_OF_VALUE = 128
"""Bytes of an array that take as long to compare as one value."""
_OF_DATA = frozenset({"argparse", "collections", "types"})
"""Python modules whose objects are looked into as the script's own."""
_CONTENT = attrgetter("cell_contents", "cell_contents")
_OF_FUNCTION = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_WITHIN: tuple[tuple[type | tuple[type, ...], tuple[str, ...]], ...] = (
    (MethodType, ("__func__", "__self__")),
    (functools.partial, ("func", "args", "keywords")),
    ((staticmethod, classmethod), ("__func__",)),
    (property, ("fget", "fset")),
    (functools.cached_property, ("func",)),
    (type(functools.cache(len)), ("__wrapped__",)),
)
"""The attributes that are looked at of objects that stand for functions."""
_SIZED = (dict, list, tuple, deque, set, frozenset)


def _size_of(value: object) -> int:
    """Return how much there is to compare of a value, without what its parts hold."""
    if isinstance(value, np.ndarray):
        is_fixed = not value.flags.writeable and not isinstance(value.base, np.ndarray)
        return 0 if is_fixed else value.nbytes // _BYTES_OF_VALUE
    return next((kind.__len__(value) for kind in _SIZED if isinstance(value, kind)), 1)


def _plain(value: object) -> object:
    """Return what can be compared of a plain value, whose ``==`` is its type's; of others ``None``."""
    kind = type(value)
    if kind is float or kind is complex:
        return kind, repr(value)  # of which no two differ for being no number
    if kind in PLAIN:
        return kind, value
    return (kind, value.tobytes()) if isinstance(value, np.generic) else None


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _content_of(cell: CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []
