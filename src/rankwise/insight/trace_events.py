# SPDX-License-Identifier: Apache-2.0
"""The timeline of ranks in the trace-event format, which Perfetto and chrome://tracing open; torch's profiler with it.

One process per rank, with a track for steps, one for their parts and one for collectives; arrows lead from the rank
that reached a collective last to those that waited for it. Times are by the clock of rank zero's host.

Source: "Trace Event Format", the description of the format by the Chromium project.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from rankwise.errors import ReportError
from rankwise.insight.step_record import MICROSECONDS
from rankwise.meter import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rankwise.insight.step_record import Record

PIDS_PER_RANK = 1000
"""The processes of a rank's trace get numbers from here on, so that those of ranks differ."""
_STEPS, _PARTS, _COLLECTIVES = 1, 2, 3
_TRACKS = {_STEPS: "steps", _PARTS: "parts", _COLLECTIVES: "collectives"}


def origin_of(records: Sequence[Record]) -> float:
    """Return when the first step of all ranks, or the first part of it, began, by rank zero's clock, in seconds."""
    starts = [
        start - clock_ahead(record)
        for record in records
        for start in (*(step.start for step in record.steps[:1]), *(one["start"] for one in _details(record)[:1]))
    ]
    return min(starts, default=0.0)


def events_of_ranks(records: Sequence[Record], origin: float) -> list[dict[str, Any]]:
    """Return the events of all ranks, with times in microseconds from ``origin``."""
    events = [event for record in records for event in _rank(record, origin)]
    return [*events, *_arrows(records, origin)]


def as_trace(events: list[dict[str, Any]]) -> str:
    """Return a file of events, as JSON."""
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def clock_ahead(record: Record) -> float:
    """Return how far the clock of a rank's host is ahead of rank zero's, as measured last."""
    measured = [note for note in record.notes if note["kind"] == "clock"]
    return float(measured[-1]["ahead"]) if measured else 0.0


def _rank(record: Record, origin: float) -> Iterator[dict[str, Any]]:
    rank, shift = record.facts["rank"], origin + clock_ahead(record)
    name = f"rank {rank} on {record.facts['hostname']}"
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for track, title in _TRACKS.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": title}}
    for step in record.steps:
        at = (step.start - shift) * MICROSECONDS
        spent = {part: round(seconds * MICROSECONDS) for part, seconds in zip(PARTS, step.parts, strict=True)}
        yield {**_slice(rank, _STEPS, f"step {step.number}", at, step.seconds * MICROSECONDS), "args": spent}
        memory = {"MiB": round(step.memory_bytes / 2**20, 1)}
        yield {"ph": "C", "name": "memory", "pid": rank, "ts": round(at, 1), "args": memory}
    for detail in _details(record):
        at = (detail["start"] - shift) * MICROSECONDS
        for part, offset, length in detail["slices"]:
            yield _slice(rank, _PARTS, PARTS[part], at + offset, length)
        for words, offset, length, *_ in detail["collectives"]:
            yield _slice(rank, _COLLECTIVES, words, at + offset, length)


def _details(record: Record) -> list[dict[str, Any]]:
    return [note for note in record.notes if note["kind"] == "detail"]


def _slice(rank: int, track: int, name: str, at: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": rank, "tid": track, "ts": round(at, 1), "dur": round(length, 1)}


def _arrows(records: Sequence[Record], origin: float) -> Iterator[dict[str, Any]]:
    """Yield an arrow from the last rank that began a collective to the end of it on each that waited."""
    begun: dict[tuple[str, int, str], dict[int, tuple[float, float]]] = defaultdict(dict)
    for record in records:
        rank, shift = record.facts["rank"], origin + clock_ahead(record)
        for detail in _details(record):
            at = (detail["start"] - shift) * MICROSECONDS
            for words, offset, length, exchange, sequence in detail["collectives"]:
                begun[exchange, sequence, words][rank] = (at + offset, at + offset + length)
    number = 0
    for (_, _, words), on_ranks in begun.items():
        last = max(on_ranks, key=lambda rank: on_ranks[rank][0])
        for rank, (_, end) in on_ranks.items():
            if rank == last or end < on_ranks[last][0]:
                # A rank that sends to others need not wait for them.
                continue
            number += 1
            arrow = {"name": "waits for", "cat": words, "id": number, "tid": _COLLECTIVES}
            yield {**arrow, "ph": "s", "pid": last, "ts": round(on_ranks[last][0], 1)}
            yield {**arrow, "ph": "f", "bp": "e", "pid": rank, "ts": round(end, 1)}


# -- traces of torch's profiler ----------------------------------------------------------------------


def timeline_of(records: Sequence[Record], profiles: Sequence[Path]) -> str:
    """Return the timeline of ranks with traces of torch's profiler next to them, as JSON.

    Raises:
        ReportError: one of these is no such trace, or of no rank of this run.
    """
    origin = origin_of(records)
    events = events_of_ranks(records, origin)
    for path in profiles:
        events += events_of(path, records, origin)
    return as_trace(events)


def events_of(path: Path, records: Sequence[Record], origin: float) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank's trace, with times in microseconds from ``origin``.

    Args:
        path: what ``torch.profiler.profile.export_chrome_trace`` has written. The rank is the one that the trace names,
            if torch's process group was open, else the last number in the file's name.
        records: of all ranks.
        origin: by the monotonic clock of rank zero's host, in seconds.

    Raises:
        ReportError: it is no such file, or of no rank of this run.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        base = trace["baseTimeNanoseconds"] / 1e9
        events = trace["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(
            f"{path} is no trace of torch's profiler.",
            evidence=f"{type(error).__name__}: {error}",
            do="pass files that torch.profiler.profile().export_chrome_trace() has written",
        ) from error
    record = _record_of(path, trace, records)
    facts = record.facts
    # What the monotonic clock showed at the beginning of time.time().
    unix_began = facts["monotonic"] - facts["started"]
    shift = (unix_began + base - clock_ahead(record) - origin) * MICROSECONDS
    pids: dict[object, int] = {}
    for event in events:
        first = PIDS_PER_RANK * (facts["rank"] + 1)
        moved = {**event, "pid": pids.setdefault(event.get("pid"), first + len(pids))}
        if "ts" in event:
            moved["ts"] = round(event["ts"] + shift, 3)
        if event.get("name") == "process_name":
            moved["args"] = {"name": f"rank {facts['rank']}: {event['args'].get('name', '')}"}
        yield moved


def _record_of(path: Path, trace: dict[str, Any], records: Sequence[Record]) -> Record:
    numbers = re.findall(r"\d+", path.stem)
    rank = trace.get("distributedInfo", {}).get("rank", int(numbers[-1]) if numbers else None)
    for record in records:
        if record.facts["rank"] == rank:
            return record
    raise ReportError(
        f"{path} does not say of which of the {len(records)} ranks it is.",
        evidence=f"rank {rank}" if rank is not None else None,
        do="put the rank at the end of the file's name: trace-3.json",
    )
