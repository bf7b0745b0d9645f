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
