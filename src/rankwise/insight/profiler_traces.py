# SPDX-License-Identifier: Apache-2.0
"""Traces of torch's profiler, one file per rank, put on the time of a timeline."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from rankwise.errors import ReportError
from rankwise.health.step_record import MICROSECONDS
from rankwise.health.step_timeline import as_trace, clock_ahead, events_of_ranks, origin_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rankwise.health.step_record import Record

PIDS_PER_RANK = 1000
"""The processes of a rank's trace get numbers from here on, so that those of ranks differ."""


def timeline_of(records: Sequence[Record], profiles: Sequence[Path]) -> str:
    """Return the timeline of ranks with traces of torch's profiler beside them, as JSON.

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
