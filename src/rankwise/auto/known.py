# SPDX-License-Identifier: Apache-2.0
"""What is known of the modules that the script calls: proofs, random numbers, and whether splitting saves time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rankwise.auto.guards import Guard
from rankwise.auto.proof import PLAIN
from rankwise.torch_private.modules import has_hooks_of_all, hooks_of, own_parameters
from rankwise.torch_private.tensors import TreeSpec, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.auto.proof import BatchDims
    from rankwise.auto.rows import OutputRows
    from rankwise.replicate.random_numbers.model_draws import DrawsOfModel

    Key = tuple[object, ...]
    """Calls that are proved together: modes of the module and its parts, and the arguments but for their sizes."""

MOST_KINDS = 64
"""Kinds of calls of a module that are proved."""
CHANGES_PROVED = 4
"""Changes of numbers after which calls are proved; of later ones, as of a schedule, the eighth, sixteenth, ... one."""
NUM_TIMED = 12
"""Calls of each way before the ways are compared."""
AGAIN = 64
"""After how many times as many calls they are timed again: the first steps of a job are not like the others."""
MARGIN = 0.97
"""Split calls have to take less than this share of the time of whole ones."""


@dataclass(slots=True)
class Pace:
    """The times of calls of one kind: of loops with split and with whole calls, by turns.

    What is timed is the time from one call to the next: forward, backward, and all that the script does in between. The
    turns change places half way: of two, three, four or six calls in a step, each one is timed as often in both ways.
    """

    is_split: bool = True
    """Whether the next calls should be split."""
    ratio: float | None = None
    """The time with split calls by the time with whole ones, once both were measured."""
    _times: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    _started: float | None = None
    _was_split: bool = True
    _num_until_timed: int = 0

    def next_is_split(self) -> bool:
        """Return whether the call that begins now is to be split."""
        now = time.perf_counter()
        if self._num_until_timed:
            self._num_until_timed -= 1
            self._started = None
            return self.is_split
        if self._started is not None:
            self._times[self._was_split].append(now - self._started)
        num = sum(map(len, self._times.values()))
        if num == 2 * NUM_TIMED:
            self._decide()
            return self.is_split
        self._started, self._was_split = now, (num % 2 == 0) == (num < NUM_TIMED)
        return self._was_split

    def take_rest(self) -> int:
        """Return how many calls are not to be timed, which the caller counts."""
        num, self._num_until_timed = self._num_until_timed, 0
        return num

    def interrupted(self) -> None:
        """Leave out the time since the last call."""
        self._started = None

    def _decide(self) -> None:
        # Without the longest loop of each way: it may have read files, or saved some.
        split, whole = (sum(times) - max(times) for times in (self._times[True], self._times[False]))
        self.ratio = split / whole
        self.is_split = self.ratio < MARGIN
        num = sum(map(len, self._times.values()))
        self._times = {True: [], False: []}
        self._num_until_timed = num * AGAIN
        self._started = None


@dataclass(slots=True)
class KindOfCall:
    """What is known of the calls of one kind."""

    number: int
    draws: DrawsOfModel
    num_calls: int = 0
    num_split: int = 0
    """How many calls ran on each rank's rows only, since they were proved first or something changed."""
    batch: BatchDims | None = None
    """Where the rows lie; ``None``: not proved."""
    outputs: tuple[OutputRows | None, ...] = ()
    """Per leaf of the outputs; ``None``: the same for every row."""
    is_doubtful: bool = False
    """Whether something has changed that such calls read, since they were proved."""
    is_random: bool = False
    pace: Pace = field(default_factory=Pace)
    """Whether splitting saves time."""
    reason: str | None = None
    """Why it is not split."""
    next_proof: int = 1
    """The number of the call that is proved next: the first, second, fourth, eighth ..."""

    def count(self) -> None:
        """Record that such a call begins."""
        self.num_calls += 1

    def start_proof(self) -> None:
        """Record that this call is proved."""
        self.pace.interrupted()
        self.next_proof = 2 * self.num_calls
        if self.is_doubtful:
            self.is_doubtful, self.num_split = False, 0  # the calls before the change were as they were proved

    def end_proof(self, batch: BatchDims, outputs: tuple[OutputRows | None, ...]) -> None:
        """Record that such calls can be split, and where the rows lie."""
        self.batch, self.outputs = batch, outputs

    def draw(self, *, is_random: bool) -> None:
        """Note whether a call has drawn random numbers."""
        self.is_random = is_random

    def draw_anew(self, number: int, draws: DrawsOfModel) -> None:
        """Draw as a kind of another number from now on: how draws lie in one dim is no knowledge of another."""
        self.number, self.draws = number, draws

    def doubt(self) -> None:
        """Have the next call proved."""
        self.is_doubtful = True

    def add_split(self) -> None:
        """Record that this call was split."""
        self.num_split += 1

    def run_whole(self, reason: str) -> None:
        """Split no such call from now on."""
        self.reason = reason


@dataclass(slots=True)
class KnownModule:
    """A module that the script has called."""

    number: int
    guard: Guard
    modes: tuple[object, ...]
    kinds: dict[Key, KindOfCall] = field(default_factory=dict)
    resting: dict[tuple[bool, bool], int] = field(default_factory=dict)
    """By training mode and whether gradients are enabled: how many calls run whole without a look at them."""
    num_changes: int = 0
    """How often something has changed that its calls read."""

    def rest(self, mode: tuple[bool, bool], count: int) -> None:
        """Have the next calls in a mode run whole without a look at them."""
        self.resting[mode] = count


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module."""

    module: nn.Module
    known: KnownModule
    kind: KindOfCall
    given: list[Any]
    """Its arguments, flat."""
    leaves: list[Any]
    """The same, of which ranks take their rows."""
    tree: TreeSpec

    @property
    def name(self) -> str:
        """The module's class."""
        return type(self.module).__name__

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments."""
        return tree_unflatten(list(self.given), self.tree)  # type: ignore[no-any-return]


class KnownModules:
    """The modules that the script has called. They are forgotten when the script drops them."""

    def __init__(self, new_draws: Callable[[str], DrawsOfModel]) -> None:
        """``new_draws`` is called for each kind of calls, with the name of its module's class."""
        self._new_draws = new_draws
        self._modules: WeakKeyDictionary[nn.Module, KnownModule] = WeakKeyDictionary()
        self._num_modules = 0
        self._num_kinds = 0

    def rests(self, module: nn.Module) -> bool:
        """Return whether a call is one of those that run whole without a look at them."""
        known = self._modules.get(module)
        mode = module.training, torch.is_grad_enabled()
        if known is None or not known.resting.get(mode):
            return False
        known.resting[mode] -= 1
        return True

    def of(self, module: nn.Module) -> KnownModule | None:
        """Return what is known of a module as it is now; ``None``: its parameters and class are made in this call."""
        known = self._modules.get(module)
        if known is None:
            if any(map(is_lazy, module.parameters())):
                return None
            self._num_modules += 1
            known = self._modules[module] = KnownModule(self._num_modules, Guard(module), _modes(module))
        elif known.guard.changed() is not None:
            _doubt(known)
            known.guard, known.modes = known.guard.renewed(), _modes(module)
        return known

    def kind(self, known: KnownModule, module: nn.Module, given: Sequence[Any], tree: TreeSpec) -> KindOfCall | None:
        """Return what is known of calls with such arguments; ``None``: there are too many kinds."""
        key = _key(known.modes, given, tree)
        kind = known.kinds.get(key)
        if kind is None and len(known.kinds) < MOST_KINDS:
            kind = known.kinds[key] = KindOfCall(*self.new_draws(type(module).__name__))
        return kind

    def new_draws(self, name: str) -> tuple[int, DrawsOfModel]:
        """Return how calls of a new kind draw, and its number; with the name of the module's class."""
        self._num_kinds += 1
        return self._num_kinds, self._new_draws(name)


def fitting(batch: BatchDims, leaves: Sequence[Any]) -> list[BatchDims]:
    """Return where the rows lie in other arguments of the same kind; nothing if they do not fit."""
    sizes = {one.shape[dim] for one, dim in zip(leaves, batch.dims, strict=True) if dim is not None}
    return [replace(batch, num_global=size) for size in sizes] if len(sizes) == 1 else []


def _doubt(known: KnownModule) -> None:
    """Record that something has changed that calls of a module read: they are proved again, if not each time."""
    known.num_changes += 1
    is_rare = known.num_changes <= CHANGES_PROVED or known.num_changes & (known.num_changes - 1) == 0
    if is_rare or not known.guard.is_of_numbers:
        for kind in known.kinds.values():
            if kind.batch is not None:
                kind.doubt()


def _key(modes: tuple[object, ...], leaves: Sequence[Any], tree: TreeSpec) -> Key:
    facts = tuple(
        (type(one), one.dim(), one.dtype, one.requires_grad)
        if isinstance(one, torch.Tensor)
        else (type(one), _setting(one) if isinstance(one, PLAIN) else "")
        for one in leaves
    )
    return (
        modes,
        has_hooks_of_all(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(),
        torch.is_autocast_enabled("cpu"),
        str(tree),
        facts,
    )


def _modes(module: nn.Module) -> tuple[object, ...]:
    return tuple(map(_modes_of, module.modules()))


def _modes_of(part: nn.Module) -> tuple[object, ...]:
    """Return what may make a part compute something else than before: hooks and parameters, and own settings."""
    own = type(part).__module__.partition(".")[0] != "torch"
    plain_values = vars(part).items() if own else ()
    settings = [(key, value) for key, value in plain_values if isinstance(value, bool | str)]
    parameters = [one for one in own_parameters(part).values() if one is not None]
    # functional_call() replaces them for a call.
    are_own = all(isinstance(one, nn.Parameter) for one in parameters)
    return part.training, sum(1 for _ in hooks_of(part)), len(parameters), are_own, *settings


def _setting(value: object) -> str:
    """Return what tells settings apart; of a float only the sign, since it may be another one in each call."""
    if isinstance(value, float):
        return f"sign {(value > 0) - (value < 0)}"
    # Python writes no decimal number of more than 4,300 digits.
    return f"{type(value).__name__} {value:x}" if isinstance(value, int) else repr(value)
