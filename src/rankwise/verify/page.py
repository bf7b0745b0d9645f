# SPDX-License-Identifier: Apache-2.0
"""The report as one page like those of ``rankwise report``: each number of ranks with its steps and modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.insight.html import Section, Table, rendered
from rankwise.verify.compare import EXACT, PHASES
from rankwise.verify.terminal import facts_of, title_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verify.conclude import Report, Verdict

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
