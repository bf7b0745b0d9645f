# SPDX-License-Identifier: Apache-2.0
"""How far apart N ranks and one rank are, in the order in which one quantity follows from another.

Values only; imports no torch. What each rank has a share of is added up over ranks; what all hold is compared on each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from rankwise.verify.records import summed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rankwise.verify.records import Last, ModuleOutput, Parameter, RankRun, Sketch, Step

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
CLOSE = 1e-4
"""Relative difference up to which a signature fits; the differences that are explained are much larger."""
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
    mine, theirs = (samples(rank.steps[:1]) for rank in (one, again))
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
    for number, one in enumerate(reference.steps):
        if any(number >= len(rank.steps) for rank in many):
            return
        theirs = [rank.steps[number] for rank in many]
        yield from _decisions(one.number, "decisions", theirs)
        yield from _data(one, theirs)
        if number == 0:
            yield from initial_gaps(one, theirs)
        yield from _forward(one, theirs)
        yield from _optimized(one, theirs, reference.facts.dtype)
        yield from _left(one.number, "buffers", one, theirs)
    one, ends = reference.last, [rank.last for rank in many if rank.last is not None]
    number = len(reference.steps)
    if one is not None and len(ends) == len(many) and all(len(rank.steps) == number for rank in many):
        yield from _decisions(number, "end", ends)
        yield from _left(number, "end", one, ends)


def _decisions(step: int, phase: Phase, theirs: Sequence[Step | Last]) -> Iterator[Gap]:
    """Yield how far apart ranks are: a value of another scale on one rank decides the same."""
    for held in zip(*(one.metrics for one in theirs), strict=False):
        yield _worst(step, phase, f"the value given to {PLATEAU}", [_relative(held[0], one) for one in held], PLATEAU)


def _data(one: Step, theirs: Sequence[Step]) -> Iterator[Gap]:
    everyone = tuple(range(len(theirs)))
    mine, total = Counter(one.inputs), sum((Counter(step.inputs) for step in theirs), Counter[int]())
    if mine != total and not all(Counter(step.inputs) == mine for step in theirs):
        name = f"{(total - mine).total()} of {total.total()} samples passed to the model"
        error = _computed_inputs_apart(one, theirs)
        yield Gap(
            one.number, "data", name, "" if error is None else "computed", everyone, WHOLLY if error is None else error
        )
        return
    yield Gap(one.number, "data", "samples passed to the model", "", everyone, 0.0)
    batches, taken = samples([one]), samples(theirs)
    if batches.total() == taken.total() and batches != taken:
        name = f"{(taken - batches).total()} of {taken.total()} samples of the batch"
        yield Gap(one.number, "data", name, "batch", everyone, WHOLLY)


def samples(steps: Iterable[Step]) -> Counter[int]:
    """Return how often each sample was taken from loaders in some steps, by its digest."""
    return Counter(digest for step in steps for batch in step.batches for digest in batch.digests)


def _computed_inputs_apart(one: Step, theirs: Sequence[Step]) -> float | None:
    """Return how far apart inputs are that another model computed, which are subject to rounding; else ``None``."""
    found = [
        _rows_apart(module.inputs, [other.inputs for other in _calls_of(module.name, theirs)])
        for module in one.modules
        if module.inputs is not None
    ]
    errors = [max(apart) for apart in found if apart]
    return max(errors) if errors and len(errors) == len(found) else None


def initial_gaps(one: Step, theirs: Sequence[Step]) -> Iterator[Gap]:
    """Yield how far apart each parameter is before a step."""
    for parameter, values in _parameters(one, theirs):
        errors = [_apart(parameter.before, value.before, parameter.before.norm) for value in values]
        yield _worst(1, "initial parameters", parameter.name, errors)


def _forward(one: Step, theirs: Sequence[Step]) -> Iterator[Gap]:
    for module in one.modules:
        errors = _rows_apart(module.output, [other.output for other in _calls_of(module.name, theirs)])
        if len(errors) == 1:
            errors *= len(theirs)
        if errors:
            yield _worst(one.number, "forward", module.name, errors, module.kind)


def _calls_of(name: str, theirs: Sequence[Step]) -> list[ModuleOutput]:
    return [module for step in theirs for module in step.modules if module.name == name]


def _rows_apart(mine: Sketch, theirs: Sequence[Sketch | None]) -> list[float]:
    """Return how far the rows of all ranks together are from those of one rank, or those of each if each has them all.

    Empty if they are other rows.
    """
    held = [one for one in theirs if one is not None]
    total = summed(held)
    if total is None or total.shape != mine.shape:
        return []
    if total.rows != mine.rows and any(one.rows != mine.rows for one in held):
        return []
    errors: list[float] = []
    for other in [total] if total.rows == mine.rows else held:
        bends = tuple(one - two for one, two in zip(mine.bends, other.bends, strict=True))
        apart = _ratio(_size(mine.minus(other)), (mine.rows * mine.squares) ** 0.5)
        errors.append(max(apart, _ratio(_size(bends), mine.squares)))
    return errors


def _optimized(one: Step, theirs: Sequence[Step], dtype: str) -> Iterator[Gap]:
    """Yield the gaps of what an optimizer steps with, and of what it makes of it."""
    number, small = one.number, _SMALL_SHARE[dtype]
    whole = sum(one.gradient.squares for one in one.parameters if one.gradient is not None) ** 0.5
    parameters = list(_parameters(one, theirs))
    for mine, values in parameters:
        if mine.gradient is not None or any(value.gradient is not None for value in values):
            scale = small * whole + (0.0 if mine.gradient is None else mine.gradient.norm)
            errors = [_apart(mine.gradient, value.gradient, scale) for value in values]
            yield _worst(number, "gradient", mine.name, errors)
    for place, group in enumerate(one.hyperparameters):
        groups = [step.hyperparameters[place] if place < len(step.hyperparameters) else {} for step in theirs]
        for key, value in group.items():
            errors = [_relative(value, other.get(key)) for other in groups]
            yield _worst(number, "hyperparameters", key, errors, one.optimizer)
    # As for gradients: what is small next to all of its kind is compared relative to that.
    squares: defaultdict[str, float] = defaultdict(float)
    for name, (_, norm) in one.state.items():
        squares[_kind_of(name)] += norm * norm
    for name, held in one.state.items():
        scale = held[1] + small * squares[_kind_of(name)] ** 0.5
        errors = [_state_apart(held, step.state.get(name), scale) for step in theirs]
        yield _worst(number, "optimizer state", name, errors, one.optimizer)
    changed = sum(_size(p.after.minus(p.before)) ** 2 for p in one.parameters) ** 0.5
    for mine, values in parameters:
        if mine.gradient is not None and mine.gradient.norm <= _NOISE[dtype] * whole:
            continue
        update = mine.after.minus(mine.before)
        scale = max(_size(update) + small * changed, _SMALL_UPDATE[dtype] * mine.before.norm)
        others = [value.after.minus(value.before) for value in values]
        errors = [_ratio(_size([a - b for a, b in zip(update, other, strict=True)]), scale) for other in others]
        yield _worst(number, "update", mine.name, errors)


def _parameters(one: Step, theirs: Sequence[Step]) -> Iterator[tuple[Parameter, list[Parameter]]]:
    by_name = [{parameter.name: parameter for parameter in step.parameters} for step in theirs]
    for parameter in one.parameters:
        values = [names[parameter.name] for names in by_name if parameter.name in names]
        # Ranks that hold parts of it are not compared.
        if len(values) == len(theirs) and all(value.before.shape == parameter.before.shape for value in values):
            yield parameter, values


def _kind_of(name: str) -> str:
    return name.partition(" of ")[0]


def _state_apart(one: tuple[float, float], other: tuple[float, float] | None, scale: float) -> float:
    if other is None:
        return WHOLLY
    scale = max(scale, other[1])
    return max(_ratio(abs(one[1] - other[1]), scale), _ratio(abs(one[0] - other[0]), max(scale, abs(one[0]))))


def _left(step: int, phase: Phase, one: Step | Last, theirs: Sequence[Step | Last]) -> Iterator[Gap]:
    """Yield the gaps of what a step, or the script, leaves in buffers and in models called without gradients only."""
    both = [("", one.buffers, [other.buffers for other in theirs])]
    # Where a rank calls a model that others do not, equal names may be of other models.
    if all(one.copies.keys() == other.copies.keys() for other in theirs):
        both.append((COPY, one.copies, [other.copies for other in theirs]))
    for kind, mine, others in both:
        for name, value in mine.items():
            held = [other.get(name) for other in others]
            if all(other is not None and other.shape == value.shape for other in held):
                yield _worst(step, phase, name, [_apart(value, other, value.norm) for other in held], kind)


# -- distances -----------------------------------------------------------------------------------------------


def _worst(step: int, phase: Phase, name: str, errors: Sequence[float], kind: str = "") -> Gap:
    worst = max(errors)
    ranks = tuple(rank for rank, error in enumerate(errors) if error > worst / 2)
    return Gap(step, phase, name, kind, ranks, worst)


def _relative(value: float, other: float | None) -> float:
    if other is None:
        return WHOLLY
    # Two that are not a number are equal.
    if value == other or (value != value and other != other):  # noqa: PLR0124
        return 0.0
    return abs(value - other) / max(abs(value), abs(other))


def _apart(one: Sketch | None, other: Sketch | None, scale: float) -> float:
    if one is None or other is None:
        existing = one or other
        return 0.0 if existing is None else _ratio(existing.norm, max(scale, existing.norm))
    return _ratio(_size(one.minus(other)), scale)


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


# -- evidence ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cause:
    """Why ranks differ, and what to change."""

    key: str
    """A name for programs: ``"summed"``."""
    words: str
    fix: str
    evidence: tuple[str, ...] = ()
    line: str = ""


class Evidence:
    """The first difference, and the records around it."""

    def __init__(self, gap: Gap, reference: RankRun, many: Sequence[RankRun]) -> None:
        self.gap = gap
        self.reference = reference
        self.many = many
        self.num_ranks = len(many)
        self.one: Step = reference.steps[gap.step - 1]
        self.theirs: list[Step] = [rank.steps[gap.step - 1] for rank in many]
        facts = many[0].facts
        self.uses_rankwise = facts.uses_rankwise
        self.replicates = "replicate" in facts.strategies
        self.is_staged = "pipeline" in facts.strategies

    def on_ranks(self, name: str) -> list[Parameter]:
        """Return a parameter as all ranks hold it."""
        return [one for step in self.theirs for one in step.parameters if one.name == name]

    def gradients(self) -> Iterator[tuple[Sketch, list[Sketch | None]]]:
        """Yield each parameter's gradient on one rank and on all ranks, those large enough to compare."""
        own = {one.name: one.gradient for one in self.one.parameters if one.gradient is not None}
        least = CLOSE * max((one.norm for one in own.values()), default=0.0)
        for name, gradient in own.items():
            if gradient.norm > least:
                yield gradient, [one.gradient for one in self.on_ranks(name)]

    @property
    def ranks_agree(self) -> bool:
        """Whether all ranks step with equal gradients."""
        return all(is_near(values[0], value) for _, values in self.gradients() for value in values)

    def with_locals(self) -> Iterator[list[Parameter]]:
        """Yield each parameter as all ranks hold it, if each has a gradient of its own samples."""
        for parameter in self.one.parameters:
            held = self.on_ranks(parameter.name)
            if all(one.local is not None and one.gradient is not None for one in held) and len(held) > 1:
                yield held

    def adds_up(self, factor: float) -> bool:
        """Return whether each gradient is the sum of the ranks' own ones, times a factor."""
        every = list(self.with_locals())
        return bool(every) and all(
            is_near(combined([one.local for one in held], [factor] * len(held)), held[0].gradient) for held in every
        )


def combined(values: Sequence[Sketch | None], weights: Sequence[float]) -> Sketch | None:
    """Return the weighted sum of sketches; its squares are those of the sum, as the projections tell."""
    total = summed(values)
    if total is None or any(value is None for value in values):
        return None
    columns = zip(*(value.projections for value in values if value is not None), strict=True)
    projections = tuple(sum(w * v for w, v in zip(weights, column, strict=True)) for column in columns)
    squares = sum(value * value for value in projections) / len(projections)
    return type(total)(total.shape, 1, squares, projections)


def ratio_of(mine: Sketch, other: Sketch | None) -> float | None:
    """Return what ``mine`` is multiplied by to be ``other``; ``None`` if it is no multiple."""
    own = sum(one * one for one in mine.projections)
    if other is None or mine.shape != other.shape or own == 0.0:
        return None
    ratio = sum(one * two for one, two in zip(mine.projections, other.projections, strict=True)) / own
    rest = sum((two - ratio * one) ** 2 for one, two in zip(mine.projections, other.projections, strict=True))
    return ratio if rest**0.5 <= CLOSE * abs(ratio) * own**0.5 else None


def is_near(one: Sketch | None, other: Sketch | None) -> bool:
    """Return whether two tensors are equal within ``CLOSE``, as their projections tell."""
    if one is None or other is None:
        return one is other
    apart = sum(value * value for value in one.minus(other)) ** 0.5 if one.shape == other.shape else float("inf")
    return apart <= CLOSE * sum(value * value for value in one.projections) ** 0.5


def is_same(one: Sketch, other: Sketch) -> bool:
    """Return whether two tensors are exactly equal."""
    return one.projections == other.projections


def is_close(one: float, other: float) -> bool:
    """Return whether two numbers are equal within ``CLOSE``."""
    return abs(one - other) <= CLOSE * max(abs(one), abs(other))
