# SPDX-License-Identifier: Apache-2.0
"""A forward pass as values, where it is cut into stages, and what each stage computes, receives and sends.

Pure: programs, names and costs in, stages out. Recorded by traced, cut by plan, run by stage_executor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from rankwise.errors import ConfigurationError
from rankwise.replicate.blocks import block_of, near
from rankwise.torch_private.tensors import TreeSpec, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rankwise.replicate.loss.batch_statistics import Statistic
    from rankwise.replicate.random_numbers.scope import PlannedDraw


TARGET_WORDS = "move this part of forward into a module of its own: a block runs unchanged"


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference, within arguments, to the value of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The properties of a tensor, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    storage: int
    """Equal for views of the same memory."""
    is_plain: bool

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(eq=False, slots=True)
class ProgramCall:
    """One call of a block, or of a function between blocks."""

    target: str | Callable[..., Any]
    """The name of the block, or the function."""
    leaves: list[Any]
    """Of the arguments, a :class:`Ref` in place of each tensor."""
    spec: TreeSpec
    """Of ``(args, kwargs)``."""
    reads: tuple[int, ...]
    results: tuple[tuple[int, int], ...]
    """(leaf of the result, number of the value) per tensor of the result."""
    is_whole: bool
    """Whether the result is one tensor."""
    changes: tuple[int, ...]
    """Values that were changed in place."""
    in_grad_mode: bool
    is_random: bool
    first_draw: int = 0
    """How many random draws come before it."""
    num_args: int = 0
    names: tuple[str, ...] | None = None
    """Of arguments by name, where no argument is a tree."""

    def __post_init__(self) -> None:
        numbers = list(range(len(self.leaves)))
        args, kwargs = tree_unflatten(numbers, self.spec)
        if [*args, *kwargs.values()] == numbers:
            self.num_args, self.names = len(args), tuple(kwargs)

    def arguments(self, values: Mapping[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)``, with values in place of their numbers."""
        leaves = [values[leaf.number] if type(leaf) is Ref else leaf for leaf in self.leaves]
        if self.names is not None:
            return tuple(leaves[: self.num_args]), dict(zip(self.names, leaves[self.num_args :], strict=True))
        return tree_unflatten(leaves, self.spec)

    def __str__(self) -> str:
        return self.target if isinstance(self.target, str) else getattr(self.target, "__name__", repr(self.target))


@dataclass(eq=False)
class Program:
    """A forward pass, for inputs of one shape."""

    calls: list[ProgramCall] = field(default_factory=list[ProgramCall])
    inputs: dict[int, int] = field(default_factory=dict[int, int])
    """From the number of a value to its leaf of ``(args, kwargs)``."""
    states: dict[int, str] = field(default_factory=dict[int, str])
    """From the number of a value to its parameter or buffer."""
    changed_states: tuple[str, ...] = ()
    """Parameters and buffers that forward changes, also within blocks."""
    constants: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    kinds: dict[int, TensorKind] = field(default_factory=dict[int, TensorKind])
    output: list[Any] = field(default_factory=list[Any])
    """Leaves of the result of forward, a :class:`Ref` in place of each tensor."""
    output_spec: TreeSpec | None = None
    drawn_shapes: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    """Of random numbers, in order."""
    has_draws_apart: bool = False
    """Whether some are made again in backward, or without gradients."""
    draws: Sequence[PlannedDraw] = ()
    """Random numbers, in order, if the samples were followed."""
    statistics: tuple[Statistic | None, ...] = ()
    """Of the tensors of the output: the statistic of several samples that each depends on."""

    def end(self, output: list[Any], spec: TreeSpec) -> None:
        """Set the leaves of the output, a :class:`Ref` in place of each tensor, and their tree."""
        self.output = output
        self.output_spec = spec

    def note_changed(self, states: Iterable[str]) -> None:
        """Note which parameters and buffers forward changes."""
        self.changed_states = tuple(states)

    @property
    def num_draws(self) -> int:
        """How often forward draws random numbers."""
        return len(self.drawn_shapes)

    def note_draw(self, shape: tuple[int, ...], *, is_apart: bool) -> None:
        """Note a random draw."""
        self.drawn_shapes.append(shape)
        self.has_draws_apart |= is_apart

    def note_samples(self, draws: Sequence[PlannedDraw], statistics: Iterable[Statistic | None]) -> None:
        """Note which random numbers the samples have, and where they met."""
        self.draws = draws
        self.statistics = tuple(statistics)

    def output_reads(self) -> list[int]:
        """Return the values that the output consists of."""
        return [leaf.number for leaf in self.output if isinstance(leaf, Ref)]

    def output_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors of the output."""
        return [self.kinds[number].shape for number in self.output_reads()]


ANYWHERE = -1
"""The stage of values that depend only on the model's inputs: each stage computes them itself."""


@dataclass(eq=False)
class Stage:
    """One stage of a program."""

    number: int
    calls: list[ProgramCall] = field(default_factory=list[ProgramCall])
    drops: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    """By call: values that are not needed after it."""
    receives: tuple[int, ...] = ()
    sends: tuple[int, ...] = ()
    changed: frozenset[int] = frozenset()
    """Received values that this stage changes in place."""


# -- where to cut -----------------------------------------------------------------------------------


def called_blocks(program: Program) -> list[str]:
    """Return the blocks of a program in the order of their first calls."""
    return list(dict.fromkeys(call.target for call in program.calls if isinstance(call.target, str)))


def cuts_before(split: Sequence[str], order: Sequence[str], modules: Iterable[str], num_stages: int) -> list[int]:
    """Return the index in ``order`` at which each stage but the first begins.

    Args:
        split: names of modules, each the first of a stage.
        order: the blocks, as they are called.
        modules: the names of all modules.
        num_stages: the wanted number of stages.

    Raises:
        ConfigurationError: a name is unknown, within a block or not called, or the names are in another order than
            the calls, or too many or too few.
    """
    known = [name for name in modules if name]
    if len(split) != num_stages - 1:
        raise ConfigurationError(
            f"split names {len(split)} cuts, but {num_stages} stages need {num_stages - 1}.",
            evidence=f"split={list(split)}",
            do=f"name {num_stages - 1} modules, each the first of a stage, or omit split",
        )
    cuts = [_cut_before(name, order, known) for name in split]
    for name, cut, before in zip(split, cuts, [0, *cuts], strict=False):
        if cut <= before:
            raise ConfigurationError(
                f"The stage before {name!r} would be empty.",
                evidence=f"blocks in the order of their calls: {', '.join(order)}",
                do="name modules in the order in which they are called, without the first",
            )
    return cuts


def _cut_before(name: str, order: Sequence[str], known: Sequence[str]) -> int:
    if name not in known:
        raise ConfigurationError(
            f"split names {name!r}, which is not a module of the model.",
            evidence=near(name, known),
            do="use names of model.named_modules()",
        )
    inside = block_of(name, order)
    if inside is not None and inside != name:
        after = order[order.index(inside) + 1 :][:1]
        raise ConfigurationError(
            f"{name!r} lies in the middle of {inside!r}, a block that is kept whole.",
            evidence=f"blocks: {', '.join(order)}",
            do=f"cut before {inside!r}" + (f", or after it: before {after[0]!r}" if after else ""),
        )
    for index, block in enumerate(order):
        if block == name or block.startswith(f"{name}."):
            return index
    raise ConfigurationError(
        f"{name!r} is not called when the model runs on the example.",
        evidence=f"blocks in the order of their calls: {', '.join(order)}",
        do="cut before a module that is called",
    )


def balanced(costs: Sequence[float], num_stages: int, together: Iterable[tuple[int, int]] = ()) -> list[int]:
    """Return the cuts that minimize the cost of the most expensive stage.

    Args:
        costs: per block, in the order of their calls.
        num_stages: the wanted number of stages.
        together: (first, last) of blocks that share a parameter and must be in one stage.

    Raises:
        ConfigurationError: there are too few places to cut.
    """
    spans = list(together)
    places = [cut for cut in range(1, len(costs)) if not any(first < cut <= last for first, last in spans)]
    if len(places) < num_stages - 1:
        raise ConfigurationError(
            f"The model has {len(places) + 1} separable parts for {num_stages} stages.",
            evidence=f"{len(costs)} blocks"
            + (f", of which blocks {', '.join(f'{a} to {b}' for a, b in spans)} share parameters" if spans else ""),
            do="use fewer ranks along pp, or a schedule with one stage per rank",
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[place]: (cost of the most expensive stage, cuts) of the blocks before the place.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(num_stages - 1):
        best = {
            place: min(
                (max(worst, sums[place] - sums[start]), [*cuts, place])
                for start, (worst, cuts) in best.items()
                if start < place
            )
            for place in places
            if any(start < place for start in best)
        }
    return min((max(worst, sums[-1] - sums[start]), cuts) for start, (worst, cuts) in best.items())[1]


def stages_of_blocks(order: Sequence[str], cuts: Sequence[int]) -> dict[str, int]:
    """Return the stage of each block."""
    return {name: sum(index >= cut for cut in cuts) for index, name in enumerate(order)}


# -- what each stage does ---------------------------------------------------------------------------


def cut(program: Program, stage_of: Mapping[str, int], num_stages: int) -> list[Stage]:
    """Return the stages of a program.

    Functions between blocks run as early as their arguments allow; those of the model's inputs alone, on every stage
    that needs them. A value that a later stage needs passes through the stages in between. ``stage_of`` is the stage
    of each block.

    Raises:
        ConfigurationError: the stages cannot run one after the other.
    """
    homes, stage_of_call = _assign(program, stage_of)
    last = num_stages - 1
    needed, runs_on = _needed(program, stage_of_call, last)
    stages = [Stage(number) for number in range(num_stages)]
    for call, numbers in zip(program.calls, runs_on, strict=True):
        for number in numbers:
            stages[number].calls.append(call)
    until = dict.fromkeys(homes, -1)
    for number, stage in needed:
        if number in homes:
            until[number] = max(until[number], stage)
    crossing = [tuple(n for n, home in homes.items() if home != ANYWHERE and home <= k < until[n]) for k in range(last)]
    for stage in stages:
        stage.receives = crossing[stage.number - 1] if stage.number else ()
        stage.sends = crossing[stage.number] if stage.number < last else ()
        stage.changed = _changed(program, stage)
        stage.drops = _drops(program, stage, program.output_reads() if stage.number == last else stage.sends)
        if not all(program.kinds[number].is_plain for number in stage.sends):
            raise ConfigurationError(
                f"A sparse tensor or a tensor that is split over ranks would be sent from stage {stage.number} to the "
                "next.",
                do="gather it at the end of the block: tensor_parallel leaves whole tensors between blocks",
            )
    _check_aliases(program, stages, homes)
    return stages


def _assign(program: Program, stage_of: Mapping[str, int]) -> tuple[dict[int, int], list[int]]:
    """Return the stage that computes each value, and the stage of each call."""
    made: dict[int, int] = {}
    homes: dict[int, int] = {}
    """The stage that computed a value, or changed it last."""
    changed_ever = {number for call in program.calls for number in call.changes}
    stage_of_call: list[int] = []
    position = 0
    for call in program.calls:
        if wrong := [number for number in call.changes if number in program.inputs]:
            raise ConfigurationError(
                f"{call} changes an input of the model in place (leaf {program.inputs[wrong[0]]}).",
                evidence="every stage reads the inputs",
                do="change a copy instead: x = x.clone()",
            )
        from_stages = [homes[number] for number in call.reads if homes.get(number, ANYWHERE) != ANYWHERE]
        if isinstance(call.target, str):
            stage = stage_of.get(call.target, 0)
            if stage < position:
                raise ConfigurationError(
                    f"{call.target} is called on stage {stage} after stage {position} has begun.",
                    evidence="a block is called several times, or in a different order than on the example",
                    do="cut before its first call or after its last",
                )
            position = stage
        elif call.is_random or call.changes or any(number in program.states for number in call.reads):
            stage = position
        elif from_stages:
            stage = max(from_stages)
        elif any(number in changed_ever for _, number in call.results):
            stage = position
        else:
            stage = ANYWHERE
        stage_of_call.append(stage)
        made.update((number, stage) for _, number in call.results)
        homes.update((number, stage) for _, number in call.results)
        homes.update((number, stage) for number in call.changes if number in homes)
    return made, stage_of_call


def _needed(program: Program, stage_of_call: Sequence[int], last: int) -> tuple[set[tuple[int, int]], list[list[int]]]:
    """Return the (value, stage) pairs that are read, and the stages each call runs on: none if no stage needs it."""
    needed = {(number, last) for number in program.output_reads()}
    runs_on: list[list[int]] = []
    for call, at in zip(reversed(program.calls), reversed(stage_of_call), strict=True):
        wanted = [stage for stage in range(last + 1) if any((number, stage) in needed for _, number in call.results)]
        if at == ANYWHERE:
            numbers = wanted
        else:
            has_effect = isinstance(call.target, str) or call.changes or call.is_random
            numbers = [at] if wanted or has_effect else []
        needed.update((number, stage) for number in call.reads for stage in numbers)
        runs_on.append(numbers)
    return needed, runs_on[::-1]


def _changed(program: Program, stage: Stage) -> frozenset[int]:
    storages = {program.kinds[number].storage for call in stage.calls for number in call.changes}
    return frozenset(number for number in stage.receives if program.kinds[number].storage in storages)


def _drops(program: Program, stage: Stage, kept: Iterable[int]) -> list[tuple[int, ...]]:
    alive = set(kept) | program.states.keys() | program.inputs.keys() | program.constants.keys()
    drops: list[tuple[int, ...]] = []
    for call in reversed(stage.calls):
        touched = {*call.reads, *(number for _, number in call.results)}
        drops.append(tuple(touched - alive))
        alive |= touched
    return drops[::-1]


def _check_aliases(program: Program, stages: Sequence[Stage], homes: Mapping[int, int]) -> None:
    """Raise if a value is changed in place while another stage holds a view of it."""
    for stage in stages:
        for index, call in enumerate(stage.calls):
            for number in call.changes:
                storage = program.kinds[number].storage
                views = {
                    n
                    for later in stage.calls[index + 1 :]
                    for n in (*later.reads, *stage.sends)
                    if n in stage.receives and n not in call.changes and program.kinds[n].storage == storage
                }
                if views and homes.get(number) != stage.number:
                    raise ConfigurationError(
                        f"{call} changes a tensor in place on stage {stage.number} that stage "
                        f"{stage.number - 1} produced, and a view of it is used afterwards.",
                        do=f"use the out-of-place operation, or {TARGET_WORDS}",
                    )


def owners(
    program: Program, stages: Sequence[Stage], names: Iterable[str], stage_of: Mapping[str, int]
) -> dict[str, set[int]]:
    """Return the stages that use each of the named parameters and buffers; the first if none does."""
    found: dict[str, set[int]] = {}
    for name in names:
        block = block_of(name, stage_of)
        found[name] = set() if block is None else {stage_of[block]}
    for stage in stages:
        for call in stage.calls:
            for number in call.reads:
                if (name := program.states.get(number)) in found:
                    found[name].add(stage.number)
    return {name: stages or {0} for name, stages in found.items()}
