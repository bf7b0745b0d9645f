# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML page without anything from a network: light and dark, printable, English or Chinese."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np

from rankwise.charts import NUM_KEYS, Bar, binned, duration, heat_map, lines, memory, speed, stacked_bars
from rankwise.errors import fold_ranks
from rankwise.insight import words
from rankwise.insight.findings import findings_of
from rankwise.insight.html import ORDER, PART_NAMES, TITLES, Page, Section, legend_of, rendered, tabled
from rankwise.insight.layouts import layout_sections
from rankwise.insight.network import links_of
from rankwise.insight.run_records import events_of, failed_ranks
from rankwise.insight.step_table import speeds_of, table_of, times_faster
from rankwise.insight.tables import Table, text_of
from rankwise.meter import EXCHANGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.insight.html import Language
    from rankwise.insight.network import Link
    from rankwise.insight.run_records import RunRecords
    from rankwise.insight.step_table import RunSpeed, StepTable

_MINUTE = 60.0
MOST_INCOMPLETE = 4
"""How many ranks with an incomplete record are named."""
_FACTS = ("hostname", "device", "backend", "source", "times", "threads", "cores", "python", "torch", "rankwise", "pid")


def page_of(run: RunRecords, language: Language, compared: Sequence[RunRecords] = ()) -> Page:
    """Return the page about a run, next to others that it is compared with."""
    titles = TITLES[language]
    table = table_of(run.ranks)
    steady = table.steady()
    links = links_of(run.ranks)
    findings = findings_of(table, [record.facts["hostname"] for record in run.ranks], links)
    names = [f"{titles['rank']} {rank}" for rank in table.ranks]
    speeds = speeds_of([run, *compared])
    times = times_faster(speeds)
    sections = [
        *([_compared(speeds, times, language)] if compared else []),
        _parts(steady, names, language),
        _steps(steady, language),
        _heat(steady, names, language),
        _who(steady, names, language),
        _network(links, language) if len(set(run.hosts)) > 1 else None,
        *_values(run, language),
        *layout_sections(run.layouts, run.hosts, language),
        _memory(steady, names, language),
        _events(run, language),
        _environment(run, language),
    ]
    headline = words.headline(
        table.num_ranks,
        table.num_steps,
        float(steady.seconds.mean()),
        findings[0] if findings else None,
        language,
        mean_parts=steady.mean_parts(),
        failed=failed_ranks(run),
        times_one_rank=times[0] if table.num_ranks > 1 and any(speed.num_ranks == 1 for speed in speeds) else None,
    )
    numbers = _numbers(table, speeds[0], titles)
    html = rendered(
        heading=("rankwise report", run.facts["script"] or "python", _when(run)),
        headline=headline,
        language=language,
        numbers=numbers,
        notes=_notes(run, titles, is_estimated=table.is_estimated),
        changes=[
            {
                "found": words.finding_in_words(one, language),
                "advice": words.advice(one, language),
                "gain": words.gain(one, language),
            }
            for one in findings
        ],
        sections=[section for section in sections if section is not None],
    )
    head, values = zip(*numbers, strict=True)
    tables = (Table(caption="", head=head, rows=(values,), is_text=True), _summary(steady, names, language))
    return Page(headline, html, "\n".join(text_of(table, titles["more rows"]) for table in tables))


def _numbers(table: StepTable, run_speed: RunSpeed, titles: dict[str, str]) -> list[tuple[str, str]]:
    """Return the key numbers, the mean ones without the first and the last step."""
    total = float(table.seconds.sum(axis=1).max())
    samples = run_speed.samples_per_second
    return [
        (titles["step time"], duration(run_speed.step_seconds)),
        (titles["samples per second"], f"{samples:,.0f}" if samples else titles["unknown"]),
        (titles["waiting"], words.percent(run_speed.parts["waiting"] / run_speed.step_seconds)),
        (titles["total time"], duration(total) if total < _MINUTE else str(timedelta(seconds=round(total)))),
    ]


def _summary(table: StepTable, names: Sequence[str], language: Language) -> Table:
    """Return where the time of a step goes, a row per part."""
    titles, part_names, means = TITLES[language], PART_NAMES[language], table.mean_parts()
    return Table(
        caption=titles["parts"],
        head=("", titles["share"], titles["mean"], titles["longest"]),
        rows=tuple(
            (
                part_names[style],
                words.percent(share),
                duration(float(means[style].mean())),
                f"{duration(float(means[style].max()))} ({names[int(means[style].argmax())]})",
            )
            for style, share in _shares(table).items()
        ),
    )


def _shares(table: StepTable) -> dict[str, float]:
    """Return the share of each part that takes time in that of all ranks."""
    means = table.mean_parts()
    whole = float(table.seconds.mean()) or 1.0
    return {style: float(means[style].mean()) / whole for style in ORDER if (means[style] > 0).any()}


def _when(run: RunRecords) -> str:
    return datetime.fromtimestamp(run.facts["started"]).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def _notes(run: RunRecords, titles: dict[str, str], *, is_estimated: bool) -> list[str]:
    notes = [titles["estimated"]] if is_estimated else []
    if run.missing:
        is_served = any(one["what"] == "calls" for one in run.layouts)
        notes.append(titles["served" if is_served else "missing"].format(", ".join(map(str, run.missing))))
    incomplete = run.incomplete
    if incomplete:
        shown = [titles["recorded"].format(*one) for one in incomplete[:MOST_INCOMPLETE]]
        others = ["..."] if len(incomplete) > MOST_INCOMPLETE else []
        notes.append(titles["incomplete"].format(", ".join([*shown, *others])))
    if run.is_followed:
        notes.append(titles["later"])
    if run.num_restarts:
        notes.append(titles["restarted"].format(run.num_restarts))
    return notes


def _compared(speeds: Sequence[RunSpeed], times: Sequence[float], language: Language) -> Section:
    """Return runs side by side: over the number of ranks if that differs, else where the time of a step goes."""
    titles, part_names = TITLES[language], PART_NAMES[language]
    order = sorted(range(len(speeds)), key=lambda index: (speeds[index].num_ranks, index))
    ranks = np.array([speeds[index].num_ranks for index in order], dtype=np.float64)
    if len(set(ranks.tolist())) > 1:
        curves = [
            (titles["measured"], ranks, np.array([times[index] for index in order])),
            (titles["ideal"], ranks, ranks / ranks.min()),
        ]
        chart = lines(curves, titles["compare"], lambda value: f"{value:.1f}", titles["ranks column"])
        legend = legend_of({f"key{number}": name for number, (name, _, _) in enumerate(curves)})
    else:
        bars = [
            Bar(label=speeds[index].name[-12:], parts=tuple((style, speeds[index].parts[style]) for style in ORDER))
            for index in order
        ]
        chart = stacked_bars(bars, titles["compare"], lambda style, length: f"{part_names[style]}: {duration(length)}")
        legend = legend_of({style: part_names[style] for style in ORDER})
    rows = tuple(
        (
            speeds[index].name,
            str(speeds[index].num_ranks),
            duration(speeds[index].step_seconds),
            f"{speeds[index].samples_per_second:,.0f}" if speeds[index].samples_per_second else "",
            f"{times[index]:.2f}",
        )
        for index in order
    )
    head = (titles["run"], titles["ranks column"], titles["total"], titles["samples per second"], titles["times"])
    return tabled("compare", titles["compare"], head, rows, note=titles["compare note"], chart=chart, legend=legend)


def _parts(table: StepTable, names: Sequence[str], language: Language) -> Section:
    titles, part_names, means = TITLES[language], PART_NAMES[language], table.mean_parts()
    bars = [
        Bar(label=name, parts=tuple((style, means[style][row]) for style in ORDER)) for row, name in enumerate(names)
    ]
    shares = _shares(table)
    rows = tuple(
        (name, *(duration(means[style][row]) for style in shares), duration(float(table.seconds[row].mean())))
        for row, name in enumerate(names)
    )
    return tabled(
        "parts",
        titles["parts"],
        (titles["rank"], *(part_names[style] for style in shares), titles["total"]),
        rows,
        chart=stacked_bars(bars, titles["parts"], lambda style, length: f"{part_names[style]}: {duration(length)}"),
        legend=legend_of({style: f"{part_names[style]} {words.percent(share)}" for style, share in shares.items()}),
    )


def _steps(table: StepTable, language: Language) -> Section:
    titles = TITLES[language]
    longest, per_column = binned(table.seconds.max(axis=0)[None])
    working, _ = binned((table.seconds - table.parts[:, :, EXCHANGE]).max(axis=0)[None])
    xs = np.arange(longest.shape[1]) * per_column + 2.0
    curves = [(titles["total"], xs, longest[0])]
    if table.num_ranks > 1:
        curves.append((titles["slowest"], xs, working[0]))
    rows = tuple((f"{int(x)}", *(duration(ys[column]) for _, _, ys in curves)) for column, x in enumerate(xs.tolist()))
    return tabled(
        "steps",
        titles["steps"],
        (titles["step"], *(name for name, _, _ in curves)),
        rows,
        chart=lines(curves, titles["steps"], duration, titles["step"]),
        legend=legend_of({f"key{number}": name for number, (name, _, _) in enumerate(curves)}),
    )


def _heat(table: StepTable, names: Sequence[str], language: Language) -> Section | None:
    if table.num_ranks == 1:
        return None
    titles = TITLES[language]
    working, per_column = binned(table.seconds - table.parts[:, :, EXCHANGE])

    def told(row: int, column: int, value: float) -> str:
        first = column * per_column + 2
        last = min(first + per_column - 1, table.num_steps + 1)
        steps = f"{first}" if first == last else f"{first}-{last}"
        return f"{names[row]}, {titles['steps column']} {steps}: {duration(value)}"

    spread = [np.quantile(table.seconds - table.parts[:, :, EXCHANGE], at, axis=1) for at in (0.1, 0.5, 0.9)]
    rows = tuple((name, *(duration(float(column[row])) for column in spread)) for row, name in enumerate(names))
    return tabled(
        "heat",
        titles["heat"],
        (titles["rank"], "10 %", "50 %", "90 %"),
        rows,
        note=titles["heat note"],
        chart=heat_map(working, names, titles["heat"], told),
    )


def _who(table: StepTable, names: Sequence[str], language: Language) -> Section | None:
    if table.num_ranks == 1:
        return None
    titles = TITLES[language]
    matrix = table.waiting_between()
    rows = tuple(
        (name, *(duration(value) if value > 0 else "" for value in matrix[row].tolist()))
        for row, name in enumerate(names)
    )
    return tabled("who", titles["who"], (titles["rank"], *names), rows, note=titles["who note"])


def _network(links: Sequence[Link], language: Language) -> Section:
    titles = TITLES[language]
    rows = tuple(
        (
            f"{link.source} → {link.destination}",
            memory(link.sent_bytes / max(1, link.num_steps)),
            speed(link.bytes_per_second) if link.is_judged else titles["unknown"],
            duration(link.round_trip_seconds),
            duration(link.least_round_trip_seconds),
            f"{100 * link.resent:.2f} %",
        )
        for link in links
    )
    columns = ("from and to", "sent per step", "rate", "round trip", "least round trip", "resent")
    note = titles["network note" if rows else "no network"]
    return tabled("network", titles["network"], tuple(titles[name] for name in columns), rows, note=note)


def _values(run: RunRecords, language: Language) -> list[Section]:
    """Return a chart for each name that values were logged under."""
    titles = TITLES[language]
    logged: dict[str, list[tuple[float, float]]] = {}
    for note in run.ranks[0].notes:
        if note["kind"] == "values":
            values = [math.nan if value is None else value for value in note["values"]]
            logged.setdefault(note["name"], []).extend(zip(note["steps"], values, strict=True))
    return [_curve_of(name, f"{titles['values']}: {name}", pairs, language) for name, pairs in logged.items()]


def _curve_of(name: str, title: str, pairs: list[tuple[float, float]], language: Language) -> Section:
    titles = TITLES[language]
    ys, per_point = binned(np.array([[value for _, value in pairs]], dtype=np.float64))
    xs = np.array([step for step, _ in pairs[::per_point]], dtype=np.float64)
    rows = tuple((f"{x:.0f}", f"{y:.6g}") for x, y in zip(xs.tolist(), ys[0].tolist(), strict=True))
    odd = [round(step) for step, value in pairs if not math.isfinite(value)]
    notes = [titles["means"].format(per_point)] if per_point > 1 else []
    notes += [titles["not finite"].format(len(odd), odd[0])] if odd else []
    return tabled(
        f"values-{name}",
        title,
        (titles["step"], name),
        rows,
        note=" ".join(notes),
        chart=lines([(name, xs, ys[0])], title, lambda value: f"{value:.4g}", titles["step"], from_zero=False),
    )


def _memory(table: StepTable, names: Sequence[str], language: Language) -> Section:
    titles = TITLES[language]
    held, per_column = binned(table.memory_bytes)
    xs = np.arange(held.shape[1]) * per_column + 2.0
    curves = [(name, xs, held[row]) for row, name in enumerate(names)]
    rows = tuple(
        (name, memory(float(table.memory_bytes[row, 0])), memory(float(table.memory_bytes[row].max())))
        for row, name in enumerate(names)
    )
    return tabled(
        "memory",
        titles["memory"],
        (titles["rank"], titles["at first"], titles["most"]),
        rows,
        chart=lines(curves, titles["memory"], memory, titles["step"]),
        legend=tuple({"style": f"key{row % NUM_KEYS}", "name": name} for row, name in enumerate(names)),
    )


def _events(run: RunRecords, language: Language) -> Section:
    titles = TITLES[language]
    rows = tuple(
        (datetime.fromtimestamp(time).astimezone().strftime("%H:%M:%S"), words.event_in_words(text, language))
        for time, text in events_of(run)
    )
    note = "" if rows else titles["no events"]
    return tabled("events", titles["events"], (titles["time"], titles["event"]), rows, note=note, is_text=True)


def _environment(run: RunRecords, language: Language) -> Section:
    titles = TITLES[language]
    rows = tuple((titles[f"fact {name}"], _fact(name, run)) for name in _FACTS)
    head = (titles["fact"], titles["value"])
    return tabled("environment", titles["environment"], head, rows, is_text=True)


def _fact(name: str, run: RunRecords) -> str:
    """Return the value that all ranks have, else each value with its ranks."""
    having: dict[str, list[int]] = {}
    for record in run.ranks:
        having.setdefault(str(record.facts.get(name, "")), []).append(record.facts["rank"])
    if len(having) == 1:
        return next(iter(having))
    return "; ".join(f"{value} ({fold_ranks(ranks)})" for value, ranks in having.items())
