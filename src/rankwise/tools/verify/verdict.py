# SPDX-License-Identifier: Apache-2.0
"""The result of a comparison of N ranks with one, as a value: what the terminal, the JSON and the page show.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rankwise.tools.verify.compare import EXACT, PHASES, differences, gaps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.tools.verify.compare import Difference, Floor, Gap, Phase
    from rankwise.tools.verify.evidence import Cause
    from rankwise.tools.verify.records import RankRun

Status = Literal["equal", "differs", "not compared"]
EXIT_CODES: dict[Status, int] = {"equal": 0, "differs": 1, "not compared": 2}


@dataclass(frozen=True, slots=True)
class First:
    """The first difference."""

    step: int
    phase: str
    name: str
    ranks: tuple[int, ...] = ()
    error: float = 0.0
    """Relative; 0 if it has no number."""
    multiple: float = 0.0
    """How many times the rounding that was allowed; 0 if it has no number."""


@dataclass(frozen=True, slots=True)
class Row:
    """One step of the table: how far apart each phase is, relative, and what was allowed."""

    step: int
    errors: dict[str, float]
    tolerances: dict[str, float]


@dataclass(frozen=True, slots=True)
class Modules:
    """How far apart the output of a module is in the step of the first difference, or the last one."""

    name: str
    kind: str
    error: float
    tolerance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What comparing one number of ranks with one rank gave."""

    num_ranks: int
    status: Status
    why: str = ""
    """Why it could not be compared."""
    first: First | None = None
    cause: Cause | None = None
    also: tuple[Cause, ...] = ()
    """Further mistakes that were found on the way."""
    notes: tuple[str, ...] = ()
    num_steps: int = 0
    rows: tuple[Row, ...] = ()
    modules: tuple[Modules, ...] = ()

    @property
    def largest(self) -> float:
        """The largest relative difference of all steps."""
        return max((error for row in self.rows for error in row.errors.values()), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All comparisons of one script."""

    script: str
    dtype: str
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]
    runs: tuple[tuple[str, float], ...]
    """What was run, and how long it took in seconds."""
    seconds: float

    @property
    def exit_code(self) -> int:
        """0: equal for every number of ranks; 1: differs for one; 2: could not be compared."""
        codes = {EXIT_CODES[verdict.status] for verdict in self.verdicts}
        return 1 if 1 in codes else max(codes)

    def content(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**asdict(self), "exit_code": self.exit_code}


def measured(reference: RankRun, many: Sequence[RankRun], floor: Floor) -> tuple[Verdict, Difference | None]:
    """Return the verdict before its cause is looked for, and the first difference."""
    found = list(gaps(reference, many))
    different = next(differences(found, floor), None)
    num_steps = min(len(run.steps) for run in (reference, *many))
    verdict = Verdict(num_ranks=len(many), status="equal", num_steps=num_steps, rows=_table(found, floor))
    shown = num_steps
    if different is not None:
        gap = different.gap
        shown = gap.step
        first = First(gap.step, gap.phase, gap.name, gap.ranks, gap.error, different.multiple)
        verdict = replace(verdict, status="differs", first=first)
    modules = (gap for gap in found if (gap.step, gap.phase) == (shown, "forward"))
    tolerance = floor.tolerance(shown, "forward")
    return (
        replace(verdict, modules=tuple(Modules(gap.name, gap.kind, gap.error, tolerance) for gap in modules)),
        different,
    )


def _table(found: Sequence[Gap], floor: Floor) -> tuple[Row, ...]:
    """Return the largest difference of each phase and step."""
    worst: dict[int, dict[Phase, float]] = {}
    for gap in found:
        errors = worst.setdefault(gap.step, {})
        errors[gap.phase] = max(errors.get(gap.phase, 0.0), gap.error)
    return tuple(
        Row(
            step,
            {phase: errors[phase] for phase in PHASES if phase in errors},
            {phase: 0.0 if phase in EXACT else floor.tolerance(step, phase) for phase in PHASES if phase in errors},
        )
        for step, errors in worst.items()
    )
