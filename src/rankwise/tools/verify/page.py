# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML page without anything from a network, for light and dark screens and for narrow ones."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from rankwise.tools.verify.compare import EXACT, PHASES
from rankwise.tools.verify.terminal import agreeing_before, difference_in_words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.tools.verify.evidence import Cause
    from rankwise.tools.verify.verdict import Modules, Report, Row, Verdict

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --back: #ffffff; --soft: #59636e; --line: #d1d9e0;
  --good: #dafbe1; --bad: #ffebe9; --unknown: #fff8c5; --bad-text: #a40e26; --good-text: #116329 }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --back: #0d1117; --soft: #9198a1; --line: #3d444d;
  --good: #12351f; --bad: #45171b; --unknown: #3d300a; --bad-text: #ffb3ae; --good-text: #7ee787 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0 auto;
  max-width: 60rem; padding: 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.3rem } h2 { font-size: 1.1rem; padding: .5rem .75rem; border-radius: 6px; margin-top: 2rem }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem }
.equal { background: var(--good) } .differs { background: var(--bad) } .unknown { background: var(--unknown) }
dl { display: grid; grid-template-columns: 5.5rem 1fr; gap: .3rem .6rem; margin: .6rem 0 }
dt { color: var(--soft) } dd { margin: 0 } code { font-size: .9em }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .6rem; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } td.equal { color: var(--good-text) }
td.differs { color: var(--bad-text); font-weight: 600 }
.soft { color: var(--soft); font-size: .85rem }
"""
_TITLES = {"equal": "compute what one rank computes", "differs": "do not compute what one rank computes"}


def page_of(report: Report) -> str:
    """Return the page."""
    title = f"rankwise verify {escape(report.script)}"
    runs = "; ".join(f"{escape(words)} {seconds:.1f} s" for words, seconds in report.runs)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main><h1>{title}</h1>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        *(_verdict(verdict) for verdict in report.verdicts),
        f'<p class="soft">Computed in {escape(report.dtype)}. Runs: {runs}; {report.seconds:.1f} s in all.</p>',
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _verdict(verdict: Verdict) -> str:
    title = _TITLES.get(verdict.status, "could not be compared with one")
    kind = verdict.status if verdict.status in _TITLES else "unknown"
    parts = [f'<section><h2 class="{kind}">{verdict.num_ranks} ranks {title}</h2>']
    facts: list[tuple[str, str]] = []
    if verdict.why:
        facts.append(("why", escape(verdict.why)))
    if verdict.first is not None:
        facts.append(("first", escape(difference_in_words(verdict.first, verdict))))
        before = agreeing_before(verdict.first)
        facts += [("equal", f"until then: {escape(before)}")] if before else []
    if verdict.cause is not None:
        facts += _cause(verdict.cause)
    if verdict.status == "equal":
        facts.append(("steps", str(verdict.num_steps)))
        facts.append(("largest", f"relative difference {verdict.largest:.1e}"))
    facts += [("also", escape(f"{cause.words}: {cause.fix}")) for cause in verdict.also]
    facts += [("note", escape(note)) for note in verdict.notes]
    parts.append("<dl>" + "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts) + "</dl>")
    if verdict.rows:
        parts.append(_steps(verdict.rows))
    if verdict.modules:
        parts.append(_modules(verdict.modules))
    return "".join([*parts, "</section>"])


def _cause(cause: Cause) -> list[tuple[str, str]]:
    where = f" <code>{escape(cause.line)}</code>" if cause.line else ""
    evidence = "".join(f"<br>{escape(line)}" for line in cause.evidence)
    return [("cause", f"{escape(cause.words)}{where}{evidence}"), ("fix", escape(cause.fix))]


def _steps(rows: Iterable[Row]) -> str:
    held = list(rows)
    phases = [phase for phase in PHASES if any(phase in row.errors for row in held)]
    head = "".join(f"<th>{phase}</th>" for phase in phases)
    lines = "".join(
        f"<tr><td>{row.step}</td>"
        + "".join(_cell(row.errors.get(phase), row.tolerances.get(phase, 0.0)) for phase in phases)
        + "</tr>"
        for row in held
    )
    exact = " and ".join(EXACT)
    return (
        "<h3>Steps</h3>"
        f'<p class="soft">The largest relative difference of each step; {exact} have to be exactly equal.</p>'
        f'<div class="wide"><table><tr><th>step</th>{head}</tr>{lines}</table></div>'
    )


def _modules(modules: Iterable[Modules]) -> str:
    lines = "".join(
        f"<tr><td>{escape(one.name)}</td><td>{escape(one.kind)}</td>{_cell(one.error, one.tolerance)}</tr>"
        for one in modules
    )
    head = "<tr><th>module</th><th>class</th><th>output</th></tr>"
    return (
        '<h3>Modules</h3><p class="soft">In the step of the first difference, else in the last one.</p>'
        f'<div class="wide"><table>{head}{lines}</table></div>'
    )


def _cell(error: float | None, tolerance: float) -> str:
    if error is None:
        return "<td></td>"
    kind = "equal" if error <= max(tolerance, 1e-12) else "differs"
    return f'<td class="{kind}">{"equal" if error == 0.0 else f"{error:.1e}"}</td>'
