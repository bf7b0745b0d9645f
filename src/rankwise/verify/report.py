# SPDX-License-Identifier: Apache-2.0
"""What ``rankwise verify`` shows: the report as text for the terminal, and as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.errors import fold_ranks
from rankwise.insight.html import Section, rendered
from rankwise.insight.tables import Table
from rankwise.verify.compare import EXACT, PHASES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verify.conclude import First, Report, Verdict

_INDENT = " " * 12


def text_of(report: Report) -> str:
    """Return the report in complete lines."""
    lines = [f"note        {note}" for note in report.notes]
    for verdict in report.verdicts:
        lines.append(f"{report.script}: {title_of(verdict)}")
        for name, (first, *others) in facts_of(verdict, report.dtype):
            lines += [f"  {name:10}{first}", *(f"{_INDENT}{other}" for other in others)]
    return "\n".join(lines) + "\n"


def title_of(verdict: Verdict) -> str:
    """Return what came out, in a few words."""
    if verdict.status == "not compared":
        return f"{verdict.num_ranks} ranks could not be compared with one"
    if verdict.status == "differs":
        return f"{verdict.num_ranks} ranks do not compute what one rank computes"
    steps = f"{verdict.num_steps} step{'s' * (verdict.num_steps != 1)}"
    return f"{verdict.num_ranks} ranks compute what one rank computes, over {steps}"


def facts_of(verdict: Verdict, dtype: str) -> Iterator[tuple[str, list[str]]]:
    """Yield what is known of a verdict: a name, and lines."""
    if verdict.status == "equal":
        yield "largest", [f"relative difference {verdict.largest:.1e}, in {dtype}"]
    if verdict.why:
        yield "why", [verdict.why]
    if verdict.first is not None:
        yield "first", [difference_in_words(verdict.first, verdict)]
        before = _agreeing_before(verdict.first)
        if before:
            yield "equal", [f"until then: {before}"]
    if verdict.cause is not None:
        where = f" ({verdict.cause.line})" if verdict.cause.line else ""
        yield "cause", [f"{verdict.cause.words}{where}", *verdict.cause.evidence]
        yield "fix", [verdict.cause.fix]
    for cause in verdict.also:
        yield "also", [cause.words, f"fix: {cause.fix}"]
    for note in verdict.notes:
        yield "note", [note]


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


def _agreeing_before(first: First) -> str:
    """Return what agrees up to the first difference."""
    if first.phase == "end":
        return f"steps 1 to {first.step}"
    compared: list[str] = [phase for phase in PHASES if phase != "decisions"]
    phases = compared[: compared.index(first.phase)] if first.phase in compared else []
    if first.step > 1:
        return f"steps 1 to {first.step - 1}" + (f", and in step {first.step} {', '.join(phases)}" if phases else "")
    return ", ".join(phases)


_STEPS = f"The largest relative difference of each step; {' and '.join(EXACT)} have to be exactly equal."
_MODULES = "The output of each module, in the step of the first difference, else in the last one."


def page_of(report: Report) -> str:
    """Return the page."""
    runs = "; ".join(f"{words} {seconds:.1f} s" for words, seconds in report.runs)
    return rendered(
        heading=("rankwise verify", report.script, ""),
        headline="; ".join(map(title_of, report.verdicts)),
        language="en",
        sections=[
            Section(
                name=f"ranks-{verdict.num_ranks}",
                title=title_of(verdict),
                tables=tuple(_tables(verdict, report.dtype)),
            )
            for verdict in report.verdicts
        ],
        notes=[*report.notes, f"Computed in {report.dtype}. Runs: {runs}; {report.seconds:.1f} s in all."],
    )


def _tables(verdict: Verdict, dtype: str) -> Iterator[Table]:
    facts = tuple((name, "; ".join(lines)) for name, lines in facts_of(verdict, dtype))
    yield Table(caption="", head=(), rows=facts, is_text=True)
    if verdict.rows:
        phases = [phase for phase in PHASES if any(phase in row.errors for row in verdict.rows)]
        rows = tuple(
            (str(row.step), *(_cell(row.errors.get(phase), row.tolerances.get(phase, 0.0)) for phase in phases))
            for row in verdict.rows
        )
        yield Table(caption=_STEPS, head=("step", *phases), rows=rows)
    if verdict.modules:
        rows = tuple((one.name, one.kind, _cell(one.error, one.tolerance)) for one in verdict.modules)
        yield Table(caption=_MODULES, head=("module", "class", "output"), rows=rows)


def _cell(error: float | None, tolerance: float) -> str:
    if error is None:
        return ""
    differs = " differs" * (error > max(tolerance, 1e-12))
    return f"{error:.1e}{differs}" if error else "equal"
