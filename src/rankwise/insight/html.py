# SPDX-License-Identifier: Apache-2.0
"""A page of sections, each a picture with its table: one file without anything from a network, light and dark."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from rankwise.charts import page_style
from rankwise.insight.titles import PART_NAMES, TITLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankwise.charts import Chart
    from rankwise.insight.titles import Language

ORDER = ("data", "forward", "backward", "exchange", "waiting", "optimizer", "script", "checkpoint", "evaluation")
"""The parts of a step as they are shown; waiting for the slowest rank is separated from the rest of the exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of the page; the first cell of each row names it."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_text: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A section of the page: a chart, and what it shows as a table."""

    name: str
    title: str
    note: str = ""
    chart: Chart | None = None
    legend: tuple[dict[str, str], ...] = ()
    tables: tuple[Table, ...] = field(default_factory=tuple)


def tabled(
    name: str,
    title: str,
    head: tuple[str, ...],
    rows: Iterable[tuple[str, ...]],
    *,
    note: str = "",
    chart: Chart | None = None,
    legend: tuple[dict[str, str], ...] = (),
    is_text: bool = False,
) -> Section:
    """Return a section with one table under its own title, or none without rows."""
    table = Table(caption=title, head=head, rows=tuple(rows), is_text=is_text)
    return Section(name=name, title=title, note=note, chart=chart, legend=legend, tables=(table,) if table.rows else ())


@dataclass(frozen=True, slots=True)
class Page:
    """A page, and the sentence that says it."""

    headline: str
    html: str


def rendered(
    *,
    heading: tuple[str, str, str],
    headline: str,
    language: Language,
    sections: Sequence[Section],
    notes: Sequence[str] = (),
    changes: Sequence[dict[str, str]] = (),
) -> str:
    """Return the page.

    Args:
        heading: the kind of page, what it is about, and when.
        headline: the sentence that says it.
        language: of the page.
        sections: in their order.
        notes: sentences below the headline.
        changes: what to change: ``found``, ``advice`` and ``gain`` of each.
    """
    template = Environment(
        loader=PackageLoader("rankwise.insight", ""), autoescape=True, undefined=StrictUndefined
    ).get_template("page.html")
    kind, subject, when = heading
    return template.render(
        language=language,
        titles=TITLES[language],
        kind=kind,
        subject=subject,
        when=when,
        headline=headline,
        notes=notes,
        changes=changes,
        chart_style=page_style(),
        sections=sections,
    )


def legend_of(language: Language) -> tuple[dict[str, str], ...]:
    """Return the parts of a step with their names, as a legend."""
    names = PART_NAMES[language]
    return tuple({"style": style, "name": names[style]} for style in ORDER)
