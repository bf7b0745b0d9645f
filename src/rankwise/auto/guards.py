# SPDX-License-Identifier: Apache-2.0
"""What a call of a module may read, compared before every call: the copies on other ranks are never stale.

Read is what the parts of the module hold, and what the names in their code stand for: globals, closures, defaults,
attributes of classes and Python modules. Code of the script is followed by its names, also where it does not run; code
of libraries once it has run. Of parameters and buffers it is not the values. Objects written in C, except those of
torch and NumPy, are compared by what they are, without what they hold.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, itemgetter
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from rankwise.auto.code_reads import functions_of, is_of_script, names_of
from rankwise.auto.comparable import (
    CONTENTS,
    OF_PARAMETER,
    SHARED_GENERATORS,
    WITHIN,
    Is,
    Watched,
    by_type,
    is_data,
    is_of_numbers,
    is_small,
    keeps_to_attributes,
    plain,
    size_of,
    slots_of,
    values_of,
)
from rankwise.torch_private.autograd import version_of
from rankwise.torch_private.modules import (
    OF_WEIGHTS,
    call_of_modules,
    hook_tables,
    own_buffers,
    own_modules,
    own_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import CodeType

    from rankwise.auto.code_reads import Ran

MOST_VALUES = 10_000
"""That are compared of one attribute or global: more would take longer than a call may."""
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_READ_UNNAMED = frozenset({"training", "forward", "backward", "setup_context"})
_BY_ANY_NAME = frozenset(
    {"getattr", "setattr", "vars", "eval", "exec", "copy", "deepcopy", "__dict__", "__getattr__", "__setattr__"}
)
"""Names in code that may read attributes it does not name."""
_CONTENT = attrgetter("cell_contents", "cell_contents")  # a tuple, for two names
_OF_FUNCTION = attrgetter("__code__", "__defaults__", "__kwdefaults__")


class Guard:
    """What calls of one module may read, as it was when the guard was made.

    It holds what it compares: it must not be kept longer than the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._ran: Ran = {}
        self._functions: list[FunctionType] = []
        self._change: str | None = None
        self.is_of_numbers = False
        """Whether what :meth:`changed` has found are numbers of the script, not code, flags, or parts of the module."""
        self._now = _Reads(module, self._ran, self._functions)

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
        """Compare also what code reads that has run in a call. What has changed until now stays changed."""
        self._change = self.changed()
        new = {key: one for key, one in ran.items() if key not in self._ran}
        module = self._module()
        if new and module is not None:
            self._ran |= new
            self._functions += functions_of(
                code for key, (code, _) in new.items() if code.co_freevars and key not in self._now.codes
            )
            self._now = _Reads(module, self._ran, self._functions)

    def changed(self) -> str | None:
        """Return the name of the first thing that is not as it was, if anything is."""
        module = self._module()
        if self._change is not None or module is None or self._now.watched.are_unchanged():
            return self._change
        now = _Reads(module, self._ran, self._functions)
        before, after = self._now.facts, now.facts
        differing = [name for name in {**after, **before} if before.get(name) != after.get(name)]
        if differing:
            foreign = self._now.foreign | now.foreign
            self.is_of_numbers = all(
                name not in foreign and is_of_numbers(before.get(name)) and is_of_numbers(after.get(name))
                for name in differing
            )
            return differing[0]
        self._now = now  # equal values, which are other objects
        return None


@dataclass(slots=True)
class _Space:
    """A namespace in which code reads names: of globals, or of a class or a Python module."""

    home: str
    """The name of the Python module."""
    words: str
    """For the name of a name in it."""
    names: Mapping[str, Any]
    has_attributes: bool
    """Whether code reads attributes of it."""
    read: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)


def _is_class(space: _Space) -> bool:
    return isinstance(space.names, MappingProxyType)


@dataclass(slots=True)
class _Root:
    """An attribute or a global, in which values are looked for."""

    name: str
    is_named: bool
    num_left: int = MOST_VALUES


class _Reads:
    """What calls of a module read, now.

    Its many fields are one search: what it has found, and where it still has to look.
    """

    def __init__(self, module: nn.Module, ran: Ran, functions: list[FunctionType]) -> None:
        self.obstacle: str | None = None
        self.facts: dict[str, list[object]] = {}
        """By name, which several may have."""
        self.foreign: set[str] = set()
        """Names of what libraries hold."""
        self.codes: dict[int, CodeType] = {}
        """That is followed, by its ``id``."""
        self.watched = Watched(module)
        self._spaces: dict[int, _Space] = {}
        self._attributes: set[str] = set(_READ_UNNAMED)
        self._stored_attributes: set[str] = set()
        self._reads_by_any_name = False
        self._is_of_script = functools.cache(is_of_script)
        self._pending: deque[tuple[str, object, _Root]] = deque()
        self._unnamed: list[tuple[str, str, object, nn.Module]] = []
        """Attributes of parts that no code has named so far: name, key and value, and the part."""
        self._looked_at: defaultdict[int, set[str]] = defaultdict(set)
        parts = list(module.modules())
        # What it holds must not keep the module itself.
        self._seen: dict[int, object] = {id(module): None, **{id(part): part for part in parts[1:]}}
        kinds = dict.fromkeys(kind for part in parts for kind in type(part).__mro__[:-1])
        self._own_homes = {"__main__", *(kind.__module__ for kind in kinds if self._is_of_script(kind.__module__))}

        for name, part in module.named_modules():
            self._read_part(name, part, name or type(module).__name__)
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
        for one in self._unnamed:
            if self._reads_by_any_name or not self._is_of_script(type(one[-1]).__module__):
                self._look_at_attribute(one, is_named=False)
        self._look_into_pending()
        for part in parts:
            self._watch_attributes(part, self._looked_at[id(part)])
        self._unnamed.clear()
        self._remember()

    def _remember(self) -> None:
        of_classes = set().union(*(one.read for one in self._spaces.values() if _is_class(one)))
        for one in self._spaces.values():
            if one.read:
                # A tuple, for one name too.
                self.watched.getters.append((itemgetter(*one.read, next(iter(one.read))), one.names))
            if one.has_attributes and self._is_of_script(one.home):
                # A class may get what it has inherited so far.
                one.stored |= self._stored_attributes | (of_classes if _is_class(one) else set())
        self.watched.remember(
            [(one.names, name) for one in self._spaces.values() for name in one.stored - one.names.keys()]
        )

    # -- parts of the module -----------------------------------------------------------------------

    def _read_part(self, name: str, part: nn.Module, title: str) -> None:
        self._note(f"the class of {title}", Is(type(part)))
        if isinstance(part, torch.jit.ScriptModule):
            self.obstacle = f"{title} is compiled by torch.jit"
            return
        tables = own_parameters(part), own_buffers(part), own_modules(part), *hook_tables(part)
        self.watched.views.extend(table.values() for table in tables if table)
        self.watched.empty.extend(table for table in tables if not table)
        for key, one in chain.from_iterable(table.items() for table in tables[:3]):
            facts = [fact(one) for fact in OF_PARAMETER] if isinstance(one, torch.Tensor) else []
            self._note(f"{name}.{key}", Is(one), *facts)
            if isinstance(one, nn.Parameter) and id(one) not in self._seen:
                self.watched.parameters.append(one)  # a buffer gets another dtype by being replaced
            if facts:
                self._seen[id(one)] = one
        hooks = [hook for table in tables[3:] for hook in table.values()]
        self._note(f"a hook of {title}", *map(Is, hooks))
        for number, hook in enumerate(hooks):
            self._queue(f"hook {number} of {title}", hook)
        self._unnamed += [(f"{name}.{key}", key, vars(part)[key], part) for key in _own_keys(part)]

    def _look_at_attribute(self, one: tuple[str, str, object, nn.Module], *, is_named: bool) -> None:
        name, key, value, part = one
        self._looked_at[id(part)].add(key)
        self._queue(name, value, is_named=is_named)

    def _watch_attributes(self, part: nn.Module, looked_at: set[str]) -> None:
        attributes = vars(part)
        if len(looked_at | _OF_TORCH) == len(attributes):
            self.watched.views.append(attributes.values())
        else:
            keys = [key for key in attributes if key in _OF_TORCH or key in looked_at]
            self.watched.getters.append((itemgetter(*keys), attributes))
            self.watched.sized.append(attributes)

    # -- names in code -----------------------------------------------------------------------------

    def _settle(self) -> None:
        """Look at what code names, until that names nothing else."""
        known = -1
        while known != len(self._seen) + len(self._attributes):
            known = len(self._seen) + len(self._attributes)
            self._look_into_pending()
            for space in list(self._spaces.values()):
                if space.has_attributes:
                    self._read(space, self._attributes)
            waiting, self._unnamed = self._unnamed, []
            for one in waiting:
                if one[1] in self._attributes:
                    self._look_at_attribute(one, is_named=True)
                else:
                    self._unnamed.append(one)

    def _read_code(self, code: CodeType, names: dict[str, Any]) -> None:
        self.codes[id(code)] = code
        found, space = names_of(code), self._space_of(names)
        self._attributes |= found.attributes - {"__init__"}  # of super(): those of classes that code names are read
        self._stored_attributes |= found.stored_attributes
        if not str(names.get("__name__")).startswith("torch."):
            self._reads_by_any_name |= not _BY_ANY_NAME.isdisjoint(found.attributes | found.globals)
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
        words = "the global {}" + ("" if name in self._own_homes else f" of {name}")
        return self._spaces.setdefault(id(names), _Space(name, words, names, has_attributes=False))

    def _read_class(self, kind: type) -> None:
        if id(kind) not in self._spaces:
            space = self._spaces[id(kind)] = _Space(
                kind.__module__, f"{kind.__name__}.{{}}", vars(kind), has_attributes=True
            )
            if self._is_of_script(kind.__module__):
                # Python calls these without a name in code.
                unnamed = {key for key, one in vars(kind).items() if key[:2] == "__" and isinstance(one, FunctionType)}
                self._read(space, unnamed - {"__init__", "__repr__"})

    def _read(self, space: _Space, names: set[str]) -> None:
        for key in sorted(names & space.names.keys() - space.read):
            space.read.add(key)
            if not self._is_of_script(space.home):
                self.foreign.add(space.words.format(key))  # other ranks have their own
            self._queue(space.words.format(key), space.names[key])

    def _follow(self, name: str, function: FunctionType) -> None:
        """Look at what a function reads; of one of a library that has not run, only at functions it stands for."""
        self._seen[id(function)] = function
        code, home = function.__code__, str(function.__globals__.get("__name__"))
        is_layer = home.startswith("torch.nn.modules.") and home != nn.Module.__module__
        is_followed = is_layer or id(code) in self.codes or self._is_of_script(home) or function is call_of_modules()
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not assigned yet
                if is_followed:
                    self.watched.getters.append((_CONTENT, cell))
                if (is_followed and key != "__class__") or isinstance(cell.cell_contents, FunctionType | MethodType):
                    self._queue(f"{name} and its {key}", cell.cell_contents)
        if is_followed:
            self._read_code(code, function.__globals__)
            self.watched.getters.append((_OF_FUNCTION, function))
            for number, one in enumerate(function.__defaults__ or ()):
                self._queue(f"default {number} of {name}", one)
            self._look_into(f"a default of {name}", function.__kwdefaults__ or {}, "[{}]", _Root(name, is_named=True))
            self._look_into(name, vars(function), ".{}", _Root(name, is_named=True))

    # -- values ------------------------------------------------------------------------------------

    def _note(self, name: str, *facts: object) -> None:
        self.facts.setdefault(name, []).append(facts)

    def _queue(self, name: str, value: object, *, is_named: bool = True) -> None:
        self._pending.append((name, value, _Root(name, is_named)))

    def _look_into_pending(self) -> None:
        while self._pending:
            name, value, root = self._pending.popleft()
            facts = self.facts.setdefault(name, [])  # before those of what it holds
            try:
                facts.append(self._fact_of(name, value, root))
            except Exception:  # noqa: BLE001 - whatever an object of the script raises when it is looked at
                facts.append(Is(value))

    def _fact_of(self, name: str, value: Any, root: _Root) -> object:
        """Return what is compared of a value; what it holds is looked at later."""
        if (fact := plain(value)) is not None:
            root.num_left -= 1
            return fact
        size, is_known = size_of(value), id(value) in self._seen
        self._seen[id(value)] = value
        if size > root.num_left:
            if root.is_named:
                self.obstacle = self.obstacle or f"it may read more of {root.name} than can be compared at every call"
            return Is(value)
        if is_known:
            return Is(value)
        root.num_left -= size if isinstance(value, np.ndarray) else 1
        if isinstance(value, torch.Tensor):
            if is_small(value):
                self.watched.contents.append((values_of, value))
                return Is(value), values_of(value)
            self.watched.tensors.extend(() if value.is_inference() else (value,))
            return Is(value), 0 if value.is_inference() else version_of(value)
        if any(value is one for one in SHARED_GENERATORS):
            return Is(value)  # their states go with each call that draws
        if (content := by_type(CONTENTS, value)) is not None:
            self.watched.contents.append((content, value))
            if isinstance(value, np.ndarray) and value.dtype == object:
                self._look_at_items(name, value.ravel().tolist(), root)
            return content(value)
        return self._fact_of_code(name, value) or self._fact_of_object(name, value, root)

    def _fact_of_code(self, name: str, value: Any) -> object:
        if isinstance(value, FunctionType):
            self._follow(name, value)
            return Is(value), Is(value.__code__)
        if isinstance(value, ModuleType):
            self._space_of(vars(value)).has_attributes |= self._is_of_script(value.__name__)
        elif isinstance(value, type):
            for kind in self._read_classes(value):
                self._read(self._spaces[id(kind)], {"__init__"})
        elif (within := by_type(WITHIN, value)) is not None:
            for key in within:
                self._queue(f"{name}.{key.strip('_')}", getattr(value, key))
        else:
            return None
        return Is(value)

    def _fact_of_object(self, name: str, value: Any, root: _Root) -> object:
        kind, fact = type(value), None
        if isinstance(value, dict | MappingProxyType):
            fact = Is(kind), len(value)
            self._look_into(name, value, "[{}]", root)
        elif isinstance(value, list | tuple | deque):
            fact = Is(kind), len(value)
            self.watched.views.extend(() if isinstance(value, tuple) else (value,))
            self._look_at_items(name, value, root)
        elif isinstance(value, set | frozenset):
            fact = Is(kind), frozenset(plain(one) or Is(one) for one in value)
            self.watched.views.append(value)
        is_own = self._is_of_script(kind.__module__) or is_data(kind) or isinstance(value, nn.Module)
        if not is_own and not (root.is_named and keeps_to_attributes(kind)):
            return fact or Is(value)
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            self._look_into(name, attributes, ".{}", root)
        if slots := slots_of(value):
            self.watched.getters.append((attrgetter(*slots, slots[0]), value))
            self._pending += [(f"{name}.{key}", getattr(value, key), root) for key in slots]
        self._read_classes(kind)
        return fact or Is(kind)

    def _look_into(self, name: str, names: Mapping[Any, Any], words: str, root: _Root) -> None:
        kind: Any = dict if isinstance(names, dict) else MappingProxyType
        self.watched.views.extend((kind.keys(names), kind.values(names)))
        for number, (key, one) in enumerate(list(kind.items(names))):
            shown = f"{type(key).__name__} {number}" if plain(key) is None else key if words == ".{}" else repr(key)
            self._pending.append((name + words.format(shown), one, root))

    def _look_at_items(self, name: str, items: Iterable[object], root: _Root) -> None:
        self._pending += [(f"{name}[{number}]", one, root) for number, one in enumerate(items)]

    def _read_classes(self, kind: type) -> list[type]:
        """Look at what code names of a class of the script and of those it is made from, and return them."""
        kinds = list(kind.__mro__[:-1]) if self._is_of_script(kind.__module__) else []
        for one in kinds:
            self._read_class(one)
        return kinds


def _own_keys(part: nn.Module) -> list[str]:
    """Return the names of a part's attributes, except those that torch computes from parameters in each call."""
    before_call = hook_tables(part)[1].values()  # as those of pruning and weight_norm
    is_computed = any(type(hook).__module__.startswith("torch.nn.utils.") for hook in before_call)
    of_torch = _OF_TORCH | OF_WEIGHTS if isinstance(part, nn.RNNBase) else _OF_TORCH
    return [
        key
        for key, one in vars(part).items()
        if key not in of_torch and not (is_computed and isinstance(one, torch.Tensor))
    ]
