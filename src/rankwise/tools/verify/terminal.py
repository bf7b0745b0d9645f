# SPDX-License-Identifier: Apache-2.0
"""The report as a few lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.errors import fold_ranks
from rankwise.tools.verify.compare import PHASES

if TYPE_CHECKING:
    from rankwise.tools.verify.evidence import Cause
    from rankwise.tools.verify.verdict import First, Report, Verdict

_INDENT = " " * 12


def text_of(report: Report) -> str:
    """Return the report in complete lines."""
    lines = [f"note        {note}" for note in report.notes]
    for verdict in report.verdicts:
        lines += _verdict(report, verdict)
    return "\n".join(lines) + "\n"


def _verdict(report: Report, verdict: Verdict) -> list[str]:
    ranks = f"{verdict.num_ranks} ranks"
    steps = f"{verdict.num_steps} step{'s' * (verdict.num_steps != 1)}"
    notes = [f"  note      {note}" for note in verdict.notes]
    if verdict.status == "equal":
        return [
            f"{report.script}: {ranks} compute what one rank computes, over {steps}",
            f"  largest   relative difference {verdict.largest:.1e}, in {report.dtype}",
            *notes,
        ]
    if verdict.status == "not compared":
        return [f"{report.script}: {ranks} could not be compared with one", f"  why       {verdict.why}", *notes]
    lines = [f"{report.script}: {ranks} do not compute what one rank computes"]
    if verdict.first is not None:
        lines += [f"  first     {difference_in_words(verdict.first, verdict)}"]
        before = agreeing_before(verdict.first)
        lines += [f"  equal     until then: {before}"] if before else []
    if verdict.cause is not None:
        lines += _cause(verdict.cause)
    lines += [f"  also      {cause.words}" for cause in verdict.also]
    return [*lines, *notes]


def _cause(cause: Cause) -> list[str]:
    where = f" ({cause.line})" if cause.line else ""
    return [
        f"  cause     {cause.words}{where}",
        *(f"{_INDENT}{line}" for line in cause.evidence),
        f"  fix       {cause.fix}",
    ]


def difference_in_words(first: First, verdict: Verdict) -> str:
    """Return the first difference as a phrase."""
    where = f"step {first.step}, {first.phase}" if first.step else first.phase
    if first.phase == "end":
        where = "after the last step"
    if first.error == 0.0:
        return f"{where}: {first.name}"
    ranks = "" if len(first.ranks) == verdict.num_ranks else f" on {fold_ranks(first.ranks)}"
    if first.phase in {"data", "hyperparameters"} or not first.multiple:
        return f"{where}: {first.name}{ranks}"
    rounding = first.error / first.multiple
    return f"{where}: {first.name}{ranks}, relative difference {first.error:.1e} (rounding explains {rounding:.0e})"


def agreeing_before(first: First) -> str:
    """Return what agrees up to the first difference."""
    if first.phase == "end":
        return f"steps 1 to {first.step}"
    compared: list[str] = [phase for phase in PHASES if phase != "decisions"]
    phases = compared[: compared.index(first.phase)] if first.phase in compared else []
    if first.step > 1:
        return f"steps 1 to {first.step - 1}" + (f", and in step {first.step} {', '.join(phases)}" if phases else "")
    return ", ".join(phases)
