# SPDX-License-Identifier: Apache-2.0
"""How far apart N ranks and one rank are, in the order in which one quantity follows from another.

Values only; imports no torch. What each rank has a share of is added up over ranks; what all hold is compared on each.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from rankwise.tools.verify.records import summed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rankwise.tools.verify.records import Last, ModuleOutput, Parameter, RankRun, Sketch, Step

Phase = Literal[
    "decisions",
    "data",
    "initial parameters",
    "forward",
    "gradient",
    "hyperparameters",
    "optimizer state",
    "update",
    "buffers",
    "end",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""In the order of cause and effect within a step; ``"end"``: what the script leaves after the last one."""
COPY = "copy"
"""The kind of what belongs to a model that was called without gradients only."""
PLATEAU = "ReduceLROnPlateau"
"""The kind of values that this scheduler was given."""
EXACT: tuple[Phase, ...] = ("data", "hyperparameters")
"""Not subject to rounding."""

BASE = {"float64": 1e-8, "as-is": 3e-5}
"""Relative differences that are always rounding."""
ASSUMED = {"float64": 1e-7, "as-is": 1e-2}
"""The same where the rounding of the script cannot be measured."""
PLAUSIBLE = {"float64": 1e-7, "as-is": 3e-3}
"""A measured difference beyond this, in the first step, is no rounding."""
JUMP = 1e4
"""A measured difference this many times that of the step before is no rounding that has grown."""
LARGEST = {"float64": 1e-4, "as-is": 5e-2}
"""Where rounding has grown beyond this, nothing can be told."""
UNLIMITED = 1e9
"""The tolerance there."""
FACTOR = 30.0
"""How many times the measured rounding still counts as rounding."""
_GROWING: tuple[Phase, ...] = ("forward", "gradient")
"""Phases in which rounding grows from step to step."""
_SMALL_SHARE = {"float64": 1e-4, "as-is": 1e-2}
"""A gradient this much smaller than the whole one is compared relative to the whole one."""
_NOISE = {"float64": 1e-10, "as-is": 1e-5}
"""A gradient this much smaller than the whole one is rounding, of which Adam makes a whole update."""
_SMALL_UPDATE = {"float64": 1e-5, "as-is": 2e-3}
"""An update this much smaller than its parameter is compared relative to the parameter, which is rounded."""
WHOLLY = 1.0
"""The relative difference of values that have no measure."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How far apart one quantity is in one step."""

    step: int
    phase: Phase
    name: str
    kind: str
    """Of a module: the name of its class."""
    ranks: tuple[int, ...]
    """The ranks on which it is, or all if it is a sum over them."""
    error: float
    """Relative to the size of the quantity."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What counts as rounding: measured on one rank with each batch permuted, or assumed."""

    dtype: str
    measured: Mapping[tuple[int, Phase], float] | None
    """The largest difference of each step and phase; ``None``: not measured."""
    why_assumed: str = ""

    @property
    def last_step(self) -> int | None:
        """The last step before rounding has grown so far that nothing can be told; ``None`` if it never has."""
        grown = [
            step
            for (step, phase), error in (self.measured or {}).items()
            if phase in _GROWING and FACTOR * error > LARGEST[self.dtype]
        ]
        return min(grown) - 1 if grown else None

    def tolerance(self, step: int, phase: Phase) -> float:
        """Return the relative difference up to which two values are equal."""
        if phase in EXACT:
            return 1e-12
        if self.measured is None:
            return ASSUMED[self.dtype]
        rounding = FACTOR * self.measured.get((step, phase), 0.0)
        # Adam makes whole updates of gradients that are rounding: they tell nothing.
        return max(BASE[self.dtype], rounding) if rounding <= LARGEST[self.dtype] else UNLIMITED


@dataclass(frozen=True, slots=True)
class Difference:
    """A gap that is more than rounding."""

    gap: Gap
    tolerance: float

    @property
    def multiple(self) -> float:
        """How many times the tolerance it is."""
        return self.gap.error / self.tolerance


# -- the floor -----------------------------------------------------------------------------------------------


def measured_floor(one: RankRun, permuted: RankRun) -> Floor:
    """Return the floor, from a run on one rank and another one in which the rows of each batch were permuted."""
    dtype = one.facts.dtype
    worst: dict[tuple[int, Phase], float] = {}
    for gap in gaps(one, [permuted]):
        key = gap.step, gap.phase
        worst[key] = max(worst.get(key, 0.0), gap.error)
    # An update may be larger: Adam makes full steps of gradients that are rounding alone.
    by_step = {step: max(worst.get((step, phase), 0.0) for phase in _GROWING) for step, _ in worst}
    first = by_step.get(1, 0.0)
    if first > PLAUSIBLE[dtype]:
        return Floor(dtype, None, "the result depends on the order of samples within a batch")
    for step, error in by_step.items():
        before = max(by_step.get(step - 1, error), _NOISE[dtype] * 1e-2)
        # In float64 nothing else turns rounding into a difference within one step.
        if dtype == "float64" and error > PLAUSIBLE[dtype] and error > JUMP * before:
            return Floor(dtype, None, f"from step {step} on, the result depends on the order of samples in a batch")
    return Floor(dtype, worst)


def is_unseeded(one: RankRun, again: RankRun) -> Gap | None:
    """Return the gap between two runs on one rank, if data or initial parameters differ."""
    mine, theirs = (_samples(rank.steps[:1]) for rank in (one, again))
    # Noise that the script adds to equal samples belongs to other rows where they are permuted.
    phases = ("initial parameters",) if mine and mine == theirs else ("data", "initial parameters")
    first = (gap for gap in gaps(one, [again]) if gap.step == 1 and gap.phase in phases)
    return next((gap for gap in first if gap.error > PLAUSIBLE[one.facts.dtype]), None)


# -- differences ---------------------------------------------------------------------------------------------


def differences(found: Iterable[Gap], floor: Floor) -> Iterator[Difference]:
    """Yield the gaps that are more than rounding, in their order."""
    last_step = floor.last_step
    for gap in found:
        if last_step is not None and gap.step > last_step and gap.phase not in EXACT:
            continue
        tolerance = floor.tolerance(gap.step, gap.phase)
        if gap.phase == "data" and gap.kind == "computed":
            tolerance = floor.tolerance(gap.step, "forward")
        if gap.error > tolerance:
            yield Difference(gap, tolerance)


def gaps(reference: RankRun, many: Sequence[RankRun]) -> Iterator[Gap]:
    """Yield how far apart each quantity is, in causal order."""
    dtype = reference.facts.dtype
    for number, one in enumerate(reference.steps):
        if any(number >= len(rank.steps) for rank in many):
            return
        theirs = [rank.steps[number] for rank in many]
        yield from _decisions(one.number, "decisions", theirs)
        yield from _data(one, theirs)
        if number == 0:
            yield from initial_gaps(one, theirs)
        yield from _forward(one, theirs)
        yield from _gradients(one, theirs, _SMALL_SHARE[dtype])
        yield from _hyperparameters(one, theirs)
        yield from _states(one, theirs, _SMALL_SHARE[dtype])
        yield from _updates(one, theirs, dtype)
        yield from _held_alike(one.number, "buffers", one.buffers, [step.buffers for step in theirs])
        yield from _copies(one.number, "buffers", one.copies, [step.copies for step in theirs])
    yield from _end(reference, many)


def _decisions(step: int, phase: Phase, theirs: Sequence[Step | Last]) -> Iterator[Gap]:
    """Yield how far apart ranks are: a value of another scale on one rank decides the same."""
    for held in zip(*(one.metrics for one in theirs), strict=False):
        yield _worst(step, phase, f"the value given to {PLATEAU}", [_relative(held[0], one) for one in held], PLATEAU)


def _end(reference: RankRun, many: Sequence[RankRun]) -> Iterator[Gap]:
    one, theirs = reference.last, [rank.last for rank in many if rank.last is not None]
    if one is None or len(theirs) < len(many) or any(len(rank.steps) != len(reference.steps) for rank in many):
        return
    number = len(reference.steps)
    yield from _decisions(number, "end", theirs)
    yield from _held_alike(number, "end", one.buffers, [last.buffers for last in theirs])
    yield from _copies(number, "end", one.copies, [last.copies for last in theirs])


def _data(one: Step, theirs: Sequence[Step]) -> Iterator[Gap]:
    everyone = tuple(range(len(theirs)))
    mine, total = Counter(one.inputs), sum((Counter(step.inputs) for step in theirs), Counter[int]())
    if mine != total and not all(Counter(step.inputs) == mine for step in theirs):
        name = f"{len(list((total - mine).elements()))} of {sum(total.values())} samples passed to the model"
        yield _computed_inputs(one, theirs, name) or Gap(one.number, "data", name, "", everyone, WHOLLY)
        return
    yield Gap(one.number, "data", "samples passed to the model", "", everyone, 0.0)
    batches, taken = _samples([one]), _samples(theirs)
    if batches.total() == taken.total() and batches != taken:
        name = f"{(taken - batches).total()} of {taken.total()} samples of the batch"
        yield Gap(one.number, "data", name, "batch", everyone, WHOLLY)


def _samples(steps: Iterable[Step]) -> Counter[int]:
    return Counter(digest for step in steps for batch in step.batches for digest in batch.digests)


def _computed_inputs(one: Step, theirs: Sequence[Step], name: str) -> Gap | None:
    """Return the gap of inputs that another model computed, which are subject to rounding."""
    errors = [
        _input_apart(module.inputs, [_inputs_of(step, module.name) for step in theirs])
        for module in one.modules
        if module.inputs is not None
    ]
    found = [error for error in errors if error is not None]
    if not found or len(found) < len(errors):
        return None
    return Gap(one.number, "data", name, "computed", tuple(range(len(theirs))), max(found))


def _input_apart(mine: Sketch, theirs: Sequence[Sketch | None]) -> float | None:
    """Return how far the rows of all ranks together are from those of one rank; ``None`` if they are not those rows."""
    total = summed(theirs)
    if total is not None and total.rows == mine.rows:
        return _rows_apart(mine, total)
    # Each rank computes the whole batch.
    whole = [other for other in theirs if other is not None and other.rows == mine.rows]
    return max(_rows_apart(mine, other) for other in whole) if len(whole) == len(theirs) else None


def _inputs_of(step: Step, name: str) -> Sketch | None:
    return next((module.inputs for module in step.modules if module.name == name), None)


def initial_gaps(one: Step, theirs: Sequence[Step]) -> Iterator[Gap]:
    """Yield how far apart each parameter is before a step."""
    for parameter, values in _parameters(one, theirs):
        errors = [_apart(parameter.before, value.before, parameter.before.norm) for value in values]
        yield _worst(1, "initial parameters", parameter.name, errors)


def _forward(one: Step, theirs: Sequence[Step]) -> Iterator[Gap]:
    everyone = tuple(range(len(theirs)))
    for module in one.modules:
        found = [_output_of(step, module.name) for step in theirs]
        outputs = [other.output for other in found if other is not None]
        total = summed(outputs)
        if total is None or total.shape != module.output.shape:
            continue
        if total.rows == module.output.rows:
            error = _rows_apart(module.output, total)
            yield Gap(one.number, "forward", module.name, module.kind, everyone, error)
        elif all(output.rows == module.output.rows for output in outputs):
            # Each rank computes the whole batch.
            errors = [_rows_apart(module.output, output) for output in outputs]
            yield _worst(one.number, "forward", module.name, errors, module.kind)


def _output_of(step: Step, name: str) -> ModuleOutput | None:
    return next((module for module in step.modules if module.name == name), None)


def _gradients(one: Step, theirs: Sequence[Step], small: float) -> Iterator[Gap]:
    whole = whole_norm(one)
    for parameter, values in _parameters(one, theirs):
        if parameter.gradient is None and all(value.gradient is None for value in values):
            continue
        norm = 0.0 if parameter.gradient is None else parameter.gradient.norm
        scale = norm + small * whole
        errors = [_apart(parameter.gradient, value.gradient, scale) for value in values]
        yield _worst(one.number, "gradient", parameter.name, errors)


def whole_norm(step: Step) -> float:
    """Return the norm of all gradients of a step together."""
    return sum(one.gradient.squares for one in step.parameters if one.gradient is not None) ** 0.5


def _hyperparameters(one: Step, theirs: Sequence[Step]) -> Iterator[Gap]:
    for number, group in enumerate(one.hyperparameters):
        for key, value in group.items():
            held = [_held(step, number, key) for step in theirs]
            errors = [_relative(value, other) for other in held]
            yield _worst(one.number, "hyperparameters", key, errors, one.optimizer)


def _held(step: Step, number: int, key: str) -> float | None:
    return step.hyperparameters[number].get(key) if number < len(step.hyperparameters) else None


def _relative(value: float, other: float | None) -> float:
    if other is None:
        return WHOLLY
    # Two that are not a number are equal.
    if value == other or (value != value and other != other):  # noqa: PLR0124
        return 0.0
    return abs(value - other) / max(abs(value), abs(other))


def _states(one: Step, theirs: Sequence[Step], small: float) -> Iterator[Gap]:
    # As for gradients: what is small beside all of its kind is compared relative to that.
    squares: dict[str, float] = {}
    for name, (_, norm) in one.state.items():
        squares[_kind_of(name)] = squares.get(_kind_of(name), 0.0) + norm * norm
    for name, held in one.state.items():
        scale = held[1] + small * squares[_kind_of(name)] ** 0.5
        errors = [_state_apart(held, step.state.get(name), scale) for step in theirs]
        yield _worst(one.number, "optimizer state", name, errors, one.optimizer)


def _kind_of(name: str) -> str:
    return name.partition(" of ")[0]


def _state_apart(one: tuple[float, float], other: tuple[float, float] | None, scale: float) -> float:
    if other is None:
        return WHOLLY
    scale = max(scale, other[1])
    return max(_ratio(abs(one[1] - other[1]), scale), _ratio(abs(one[0] - other[0]), max(scale, abs(one[0]))))


def _updates(one: Step, theirs: Sequence[Step], dtype: str) -> Iterator[Gap]:
    # As for gradients: what is small beside the whole update is compared relative to that.
    whole = sum(_size(p.after.minus(p.before)) ** 2 for p in one.parameters) ** 0.5
    noise = _NOISE[dtype] * whole_norm(one)
    for parameter, values in _parameters(one, theirs):
        if parameter.gradient is not None and parameter.gradient.norm <= noise:
            continue
        update = parameter.after.minus(parameter.before)
        scale = max(_size(update) + _SMALL_SHARE[dtype] * whole, _SMALL_UPDATE[dtype] * parameter.before.norm)
        changes = [value.after.minus(value.before) for value in values]
        errors = [_ratio(_size(tuple(a - b for a, b in zip(update, other, strict=True))), scale) for other in changes]
        yield _worst(one.number, "update", parameter.name, errors)


def _held_alike(
    step: int, phase: Phase, one: Mapping[str, Sketch], theirs: Sequence[Mapping[str, Sketch]], kind: str = ""
) -> Iterator[Gap]:
    for name, mine in one.items():
        held = [other.get(name) for other in theirs]
        if all(value is not None and value.shape == mine.shape for value in held):
            yield _worst(step, phase, name, [_apart(mine, value, mine.norm) for value in held], kind)


def _copies(
    step: int, phase: Phase, one: Mapping[str, Sketch], theirs: Sequence[Mapping[str, Sketch]]
) -> Iterator[Gap]:
    # Where a rank calls a model that others do not, equal names may be of other models.
    if all(one.keys() == other.keys() for other in theirs):
        yield from _held_alike(step, phase, one, theirs, COPY)


def _parameters(one: Step, theirs: Sequence[Step]) -> Iterator[tuple[Parameter, list[Parameter]]]:
    by_name = [{parameter.name: parameter for parameter in step.parameters} for step in theirs]
    for parameter in one.parameters:
        values = [names[parameter.name] for names in by_name if parameter.name in names]
        # Ranks that hold parts of it are not compared.
        if len(values) == len(theirs) and all(value.before.shape == parameter.before.shape for value in values):
            yield parameter, values


def _worst(step: int, phase: Phase, name: str, errors: Sequence[float], kind: str = "") -> Gap:
    worst = max(errors)
    ranks = tuple(rank for rank, error in enumerate(errors) if error > worst / 2)
    return Gap(step, phase, name, kind, ranks, worst)


def _apart(one: Sketch | None, other: Sketch | None, scale: float) -> float:
    if one is None or other is None:
        existing = one or other
        return 0.0 if existing is None else _ratio(existing.norm, max(scale, existing.norm))
    return _ratio(_size(one.minus(other)), scale)


def _rows_apart(one: Sketch, other: Sketch) -> float:
    bends = tuple(mine - theirs for mine, theirs in zip(one.bends, other.bends, strict=True))
    return max(_ratio(_size(one.minus(other)), (one.rows * one.squares) ** 0.5), _ratio(_size(bends), one.squares))


def _size(projections: Sequence[float]) -> float:
    """Estimate the norm of a tensor from its projections."""
    return (sum(value * value for value in projections) / max(1, len(projections))) ** 0.5


def _ratio(size: float, scale: float) -> float:
    if size == 0.0:
        return 0.0
    # A size that is not a number on one side only.
    if size != size:  # noqa: PLR0124
        return WHOLLY
    return size / scale if scale > 0.0 else WHOLLY
