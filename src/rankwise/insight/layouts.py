# SPDX-License-Identifier: Apache-2.0
"""Pictures of how ranks and models are laid out: the axes of a mesh, the devices of a model, a step of a pipeline."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rankwise.charts import (
    MOST_COLUMNS,
    NUM_KEYS,
    Cell,
    Span,
    cells,
    duration,
    memory,
    schedule_legend,
    schedule_rows,
    spans,
)
from rankwise.errors import ConfigurationError, ReportError
from rankwise.insight import words
from rankwise.insight.html import TITLES, Page, Section, legend_of, shown, tabled
from rankwise.world.mesh import NAMES, Axes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.charts import Measured
    from rankwise.insight.html import Language
    from rankwise.insight.run_records import RunRecords

_GROUPS_SHOWN = 4


def layout_sections(layouts: Sequence[dict[str, Any]], hosts: Sequence[str], language: Language) -> list[Section]:
    """Return a section for each layout that a run has recorded, where there is more than one rank or device.

    Args:
        layouts: what :func:`rankwise.meter.note_layout` has recorded.
        hosts: of each rank.
        language: of the page.
    """
    make = {
        "mesh": lambda one: mesh_section(Axes(**one["axes"]), hosts, language),
        "placement": lambda one: _placement(one["parts"], language),
        "schedule": lambda one: _schedule(one["title"], one["spans"], language),
        "calls": lambda one: _calls(one["rows"], language),
    }
    return [make[one["what"]](one) for one in layouts]


def mesh_section(axes: Axes, hosts: Sequence[str], language: Language) -> Section:
    """Return the picture of a mesh: a row per axis, a cell per rank with its coordinate along the axis."""
    titles = TITLES[language]
    named = [name for name in NAMES if axes.size(name) > 1] or ["dp_replicate"]
    shown = range(min(axes.world_size, MOST_COLUMNS))
    places = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    rows = [(titles["rank"], [Cell("script", str(rank), f"{titles['rank']} {rank}") for rank in shown])]
    if len(places) > 1:
        rows.append((titles["host"], [_key(places[hosts[rank]], hosts[rank]) for rank in shown]))
    for name in named:
        along = [axes.coordinate(rank, name) for rank in shown]
        rows.append((name, [_key(at, f"{titles['rank']} {rank}: {name} {at}") for rank, at in enumerate(along)]))
    return tabled(
        "mesh",
        titles["mesh"],
        (titles["axis"], titles["size"], titles["groups"], titles["what it is"]),
        [
            (
                name,
                str(axes.size(name)),
                _groups_in_words(axes.groups_along(name), hosts, titles),
                titles[f"axis {name}"],
            )
            for name in named
        ],
        note=titles["mesh note"],
        chart=cells(rows, titles["mesh"]),
        is_text=True,
    )


def _key(number: int, title: str) -> Cell:
    return Cell(f"key{number % NUM_KEYS}", str(number), title)


def _groups_in_words(groups: Sequence[Sequence[int]], hosts: Sequence[str], titles: dict[str, str]) -> str:
    listed = "; ".join(", ".join(map(str, group)) for group in groups[:_GROUPS_SHOWN])
    more = "; …" if len(groups) > _GROUPS_SHOWN else ""
    is_within = all(len({hosts[rank] for rank in group}) == 1 for group in groups)
    return f"{listed}{more} ({titles['within hosts'] if is_within else titles['across hosts']})"


def _calls(rows: Sequence[tuple[str, int, str]], language: Language) -> Section:
    """Return which calls of modules were split over the ranks, with ``--auto``, and why others were not."""
    titles = TITLES[language]
    return tabled(
        "calls",
        titles["calls"],
        (titles["module"], titles["number of calls"], titles["runs on"], titles["why"]),
        [
            (name, f"{count:,}", titles["one rank"] if reason else titles["all ranks"], reason)
            for name, count, reason in sorted(rows, key=lambda row: -row[1])
        ],
        note=titles["calls note"],
        is_text=True,
    )


def _placement(parts: Sequence[Sequence[Any]], language: Language) -> Section:
    titles = TITLES[language]
    boxes: dict[str, list[Span]] = {}
    for number, (module, device, num_bytes, *_) in enumerate(parts):
        row = boxes.setdefault(device, [])
        start = row[-1].end if row else 0.0
        told = f"{module}: {memory(num_bytes)}"
        row.append(Span(f"key{number % NUM_KEYS}", start, start + num_bytes, module, told))
    rows = tuple((module, device, memory(size), runs_on, why) for module, device, size, runs_on, why in parts)
    return tabled(
        "placement",
        titles["placement"],
        (titles["part"], titles["device"], titles["bytes"], titles["runs on"], titles["why"]),
        rows,
        note=titles["placement note"],
        chart=spans(list(boxes.items()), titles["placement"], memory),
        legend=legend_of({f"key{number}": module for number, (module, *_) in enumerate(parts[:NUM_KEYS])}),
        is_text=True,
    )


def _schedule(title: str, measured: Sequence[Measured], language: Language) -> Section:
    titles = TITLES[language]
    rows = schedule_rows(measured, titles)
    busy = [sum(span.end - span.start for span in row) for _, row in rows]
    whole = max(end for *_, end in measured)
    return tabled(
        "schedule",
        titles["schedule"],
        (titles["rank"], titles["computes"], titles["waits"]),
        tuple((name, duration(time), duration(whole - time)) for (name, _), time in zip(rows, busy, strict=True)),
        note=title,
        chart=spans(rows, titles["schedule"], duration),
        legend=legend_of(dict(schedule_legend(measured))),
    )


def page_of_layouts(run: RunRecords, language: Language) -> Page:
    """Return the page about how a run was laid out.

    Raises:
        ReportError: it has recorded no layout.
    """
    sections = layout_sections(run.layouts, run.hosts, language)
    if not sections:
        raise ReportError(
            f"The run in {run.folder} has recorded no layout.",
            evidence="layouts are recorded by mesh() and the strategies that use one, place(), and step.measure()",
            do=f"rankwise report {run.folder}, which shows where its time went",
        )
    headline = " · ".join(section.title for section in sections)
    return shown(run.facts["script"] or "python", "", headline, sections, language)


def page_of_mesh(text: str, ranks_per_host: int | None, language: Language) -> Page:
    """Return the page about a mesh, such as ``dp_shard=4,tp=2``.

    Raises:
        ConfigurationError: these are no axes, or their ranks do not fill hosts evenly.
    """
    axes = _axes(text)
    num = axes.world_size
    per_host = num if ranks_per_host is None else ranks_per_host
    if per_host < 1 or num % per_host:
        raise ConfigurationError(
            f"{num} ranks do not fill hosts with {per_host} each.",
            do=f"pass --ranks-per-host {math.gcd(num, per_host)}",
        )
    hosts = [f"host {rank // per_host}" for rank in range(num)]
    headline = words.mesh_headline(str(axes), num, num // per_host, language)
    return shown(text, "", headline, [mesh_section(axes, hosts, language)], language)


def _axes(text: str) -> Axes:
    sizes: dict[str, int] = {}
    for one in text.split(","):
        name, _, size = one.partition("=")
        if name not in NAMES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise ConfigurationError(
                f"{one!r} is not the size of an axis.",
                evidence=f"the axes are {', '.join(NAMES)}, each once",
                do="pass dp_shard=4,tp=2",
            )
        sizes[name] = int(size)
    return Axes(**sizes)
