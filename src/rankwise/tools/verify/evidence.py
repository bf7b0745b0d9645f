# SPDX-License-Identifier: Apache-2.0
"""The records around a difference, and what can be computed from them: ratios, sums over ranks, who agrees.

Values only; imports no torch. Used by ``causes`` and ``mistakes``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.tools.verify.records import summed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.tools.verify.compare import Gap
    from rankwise.tools.verify.records import Parameter, RankRun, Sketch, Step

CLOSE = 1e-4
"""Relative difference up to which a signature fits; the differences that are explained are much larger."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why ranks differ, and what to change."""

    key: str
    """A name for programs: ``"summed"``."""
    words: str
    fix: str
    evidence: tuple[str, ...] = ()
    line: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The first difference, and the records around it."""

    gap: Gap
    reference: RankRun
    many: tuple[RankRun, ...]
    is_joined: bool
    """Whether the reference took the ranks' batches together."""

    @property
    def num_ranks(self) -> int:
        """How many ranks were compared with one."""
        return len(self.many)

    @property
    def one(self) -> Step:
        """The step of the reference."""
        return self.reference.steps[self.gap.step - 1]

    @property
    def theirs(self) -> list[Step]:
        """The step of each rank."""
        return [rank.steps[self.gap.step - 1] for rank in self.many]

    @property
    def uses_rankwise(self) -> bool:
        """Whether the script called ``rankwise.join()``."""
        return self.many[0].facts.uses_rankwise

    @property
    def replicates(self) -> bool:
        """Whether the script called ``rankwise.replicate()``."""
        return "replicate" in self.many[0].facts.strategies

    @property
    def is_staged(self) -> bool:
        """Whether the script called ``rankwise.pipeline()``."""
        return "pipeline" in self.many[0].facts.strategies


def pairs(evidence: Evidence) -> Iterator[tuple[Sketch | None, list[Sketch | None]]]:
    """Yield each parameter's gradient on one rank and on all ranks, those large enough to compare."""
    whole = max((one.gradient.norm for one in evidence.one.parameters if one.gradient is not None), default=0.0)
    for parameter in evidence.one.parameters:
        if parameter.gradient is not None and parameter.gradient.norm > CLOSE * whole:
            yield (
                parameter.gradient,
                [one.gradient for step in evidence.theirs for one in step.parameters if one.name == parameter.name],
            )


def locals_of(evidence: Evidence) -> Iterator[list[Parameter]]:
    """Yield each parameter as all ranks hold it, if each has a gradient of its own samples."""
    for parameter in evidence.one.parameters:
        held = [one for step in evidence.theirs for one in step.parameters if one.name == parameter.name]
        if all(one.local is not None and one.gradient is not None for one in held) and len(held) > 1:
            yield held


def ranks_agree(evidence: Evidence) -> bool:
    """Return whether all ranks step with equal gradients."""
    return all(is_near(values[0], value) for _, values in pairs(evidence) for value in values)


def agree(parameters: Sequence[Parameter]) -> bool:
    """Return whether all ranks hold equal gradients of one parameter."""
    return all(is_near(parameters[0].gradient, one.gradient) for one in parameters)


def combined(values: Sequence[Sketch | None], weights: Sequence[float]) -> Sketch | None:
    """Return the weighted sum of sketches; its squares are those of the sum, as the projections tell."""
    if any(value is None for value in values):
        return None
    columns = zip(*(value.projections for value in values if value is not None), strict=True)
    projections = tuple(sum(w * v for w, v in zip(weights, column, strict=True)) for column in columns)
    total = summed(values)
    if total is None:
        return None
    squares = sum(value * value for value in projections) / len(projections)
    return type(total)(total.shape, 1, squares, projections)


def ratio_of(mine: Sketch | None, other: Sketch | None) -> float | None:
    """Return what ``mine`` is multiplied by to be ``other``; ``None`` if it is no multiple."""
    if mine is None or other is None or mine.shape != other.shape:
        return None
    dot = sum(one * two for one, two in zip(mine.projections, other.projections, strict=True))
    own = sum(one * one for one in mine.projections)
    if own == 0.0:
        return None
    ratio = dot / own
    rest = sum((two - ratio * one) ** 2 for one, two in zip(mine.projections, other.projections, strict=True))
    return ratio if rest**0.5 <= CLOSE * abs(ratio) * own**0.5 else None


def is_near(one: Sketch | None, other: Sketch | None) -> bool:
    """Return whether two tensors are equal within ``CLOSE``, as their projections tell."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    apart = sum(value * value for value in one.minus(other)) ** 0.5
    size = sum(value * value for value in one.projections) ** 0.5
    return apart <= CLOSE * size


def is_same(one: Sketch | None, other: Sketch | None) -> bool:
    """Return whether two tensors are exactly equal."""
    return one is not None and other is not None and one.projections == other.projections


def is_close(one: float, other: float) -> bool:
    """Return whether two numbers are equal within ``CLOSE``."""
    return abs(one - other) <= CLOSE * max(abs(one), abs(other))
