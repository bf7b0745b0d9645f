# SPDX-License-Identifier: Apache-2.0
"""The records of all ranks of a run, read: from the folder of ``--report``, or of one rank while it trains.

A rank that is still training is not asked, and notices nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rankwise.errors import ReportError, fold_ranks
from rankwise.insight.step_record import Record, read, read_latest
from rankwise.launch.report.failure_report import EVENTS
from rankwise.log import warn
from rankwise.meter import EXCHANGE, FAILURE, PARTS, SUFFIX

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


MOST_RANKS = 2**20
"""More are not the number of ranks of a run: the header is damaged."""
LATEST_SECONDS = 1e11
"""The latest time that can be shown as a date."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecords:
    """What the ranks of one run have recorded."""

    folder: Path
    ranks: tuple[Record, ...]
    """Of the last attempt, in rank order."""
    missing: tuple[int, ...]
    """Ranks of that attempt without a record of a step."""
    num_restarts: int
    """How many attempts there were before."""
    is_followed: bool = False
    """Whether a later start, of this job or another one, has completed no step."""
    events: tuple[dict[str, Any], ...]
    """What the launcher has reported of this job, oldest first."""

    @property
    def hosts(self) -> list[str]:
        """The host of each rank; that of the first one where a rank has no record."""
        of_rank = {record.facts["rank"]: record.facts["hostname"] for record in self.ranks}
        return [of_rank.get(rank, self.facts["hostname"]) for rank in range(self.facts["world_size"])]

    @property
    def incomplete(self) -> list[tuple[int, int, int]]:
        """Ranks that have recorded fewer steps than they have made, with both numbers: those that lack most first."""
        counts = [(record.facts["rank"], len(record.steps), record.now.num_steps) for record in self.ranks]
        lacking = [(rank, recorded, made) for rank, recorded, made in counts if recorded < made]
        return sorted(lacking, key=lambda one: one[1] - one[2])

    @property
    def layouts(self) -> list[dict[str, Any]]:
        """How the ranks and the model were laid out, as the first rank has recorded it: the latest of each kind."""
        latest = {note["what"]: note for note in self.ranks[0].notes if note["kind"] == "layout"}
        return list(latest.values())

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that the first rank has recorded."""
        return self.ranks[0].facts


def read_run(folder: Path) -> RunRecords:
    """Return the records of the latest run in a folder that has completed a step; if restarted, of its last attempt.

    Raises:
        ReportError: there is no record of a step.
    """
    records = _readable(sorted(folder.glob(f"*{SUFFIX}")))
    if not records:
        raise ReportError(
            f"{folder} has no record of a run.",
            do=f"rankwise run --report {folder} train.py\nor rankwise.join(report={str(folder)!r}) in the script",
        )
    by_start = sorted(records, key=lambda record: record.facts["started"])
    latest = next((record for record in reversed(by_start) if record.steps), by_start[-1]).facts
    of_job = [record for record in records if record.facts["job"] == latest["job"]]
    ranks = sorted((record for record in of_job if _is_of_start(record, latest)), key=lambda one: one.facts["rank"])
    _check_one_run(folder, ranks)
    with_steps = tuple(record for record in ranks if record.steps)
    if not with_steps:
        raise ReportError(
            f"No rank of the run in {folder} has completed a step.",
            evidence=f"records of {fold_ranks([record.facts['rank'] for record in ranks])}, without a step",
            do="run the script until an optimizer has updated parameters, in the main thread",
        )
    present = {record.facts["rank"] for record in with_steps}
    return RunRecords(
        folder=folder,
        ranks=with_steps,
        missing=tuple(rank for rank in range(ranks[0].facts["world_size"]) if rank not in present),
        num_restarts=latest["attempt"],
        is_followed=not _is_of_start(by_start[-1], latest),
        events=tuple(event for event in _events(folder) if _is_of_job(event, of_job, records)),
    )


def _is_of_start(record: Record, facts: dict[str, Any]) -> bool:
    """Return whether a record is of the same attempt of the same job as facts."""
    return bool((record.facts["job"], record.facts["attempt"]) == (facts["job"], facts["attempt"]))


def _readable(paths: Sequence[Path]) -> list[Record]:
    """Return the records in these files, and warn about a file that is none, if there are others.

    Raises:
        ReportError: none is.
    """
    records: list[Record] = []
    errors: list[ReportError] = []
    for path in paths:
        try:
            records.append(_checked(read(path), path))
        except ReportError as error:
            errors.append(error)
        except OSError as error:
            errors.append(ReportError(f"{path} cannot be read: {error.strerror}.", do="move it out of the folder"))
    if errors and not records:
        raise errors[0]
    for error in errors:
        warn(f"left out of the report: {error.what}")
    return records


def _events(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / EVENTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        warn(f"left out of the report: {folder / EVENTS} cannot be read: {error.strerror}")
        return []
    found = [_event(line) for line in lines]
    events = [event for event in found if event is not None]
    if len(events) < len(found):
        warn(f"left out of the report: {len(found) - len(events)} damaged lines of {folder / EVENTS}")
    return events


def _is_of_job(event: dict[str, Any], of_job: Sequence[Record], of_all: Sequence[Record]) -> bool:
    """Return whether a launcher of this job has reported an event.

    That of a launcher without ranks is of this job if it was reported after a rank had started.
    """
    launcher = event.get("launcher", "")
    if any(record.facts.get("launcher") == launcher for record in of_all):
        return any(record.facts.get("launcher") == launcher for record in of_job)
    return bool(event["time"] >= min(record.facts["started"] for record in of_job))


def _event(line: str) -> dict[str, Any] | None:
    """Return an event; ``None`` for a line that was written in part, or by something else."""
    try:
        event = json.loads(line)
        is_whole = _is_time(event["time"]) and isinstance(event["text"], str)
        is_whole = is_whole and isinstance(event.get("launcher", ""), str)
        return event if is_whole and (event["kind"] != FAILURE or type(event["rank"]) is int) else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < LATEST_SECONDS


def _checked(record: Record, path: Path) -> Record:
    """Return a record whose facts are of the right kinds; raise a ReportError for another one."""
    facts = record.facts
    kinds = {"job": str, "hostname": str, "script": str, "rank": int, "world_size": int, "attempt": int}
    is_whole = all(type(facts.get(name)) is kind for name, kind in kinds.items())
    is_whole = is_whole and _is_time(facts.get("started")) and isinstance(facts.get("monotonic"), int | float)
    if not is_whole or not 0 <= facts["rank"] < facts["world_size"] <= MOST_RANKS or facts["attempt"] < 0:
        raise ReportError(f"{path} is damaged: its header does not describe a rank.", do="move it out of the folder")
    return record


def _check_one_run(folder: Path, ranks: Sequence[Record]) -> None:
    """Raise if records are of runs with different numbers of ranks: of an earlier run in the same folder."""
    sizes = sorted({record.facts["world_size"] for record in ranks})
    if len(sizes) > 1:
        raise ReportError(
            f"{folder} has records of several runs.",
            evidence=f"of {' and of '.join(map(str, sizes))} ranks",
            do="give every run a folder of its own",
        )


def events_of(run: RunRecords) -> list[tuple[float, str]]:
    """Return the time and the text of every event, oldest first: of the launcher, and of ranks, each with its number.

    What all ranks have recorded, such as a save, is one event.
    """
    told: defaultdict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for record in run.ranks:
        num_times: Counter[str] = Counter()
        for note in record.notes:
            if note["kind"] in {"event", FAILURE}:
                text = note["text"].strip()
                num_times[text] += 1
                told[text, num_times[text]].append((note["time"], record.facts["rank"]))
    found = [(event["time"], event["text"].strip()) for event in run.events]
    for (text, _), moments in told.items():
        whose = "" if len(moments) == len(run.ranks) else f"{fold_ranks([rank for _, rank in moments])}: "
        found.append((min(time for time, _ in moments), f"{whose}{text}"))
    return sorted((time, text) for time, text in found if text)


def failed_ranks(run: RunRecords) -> tuple[int, ...] | None:
    """Return the ranks whose failure ended the run, empty if unknown; ``None`` if it has not failed."""
    started = min(record.facts["started"] for record in run.ranks)
    # Of earlier attempts there are events too, but no records here.
    told = [event["rank"] for event in run.events if event.get("kind") == FAILURE and event["time"] >= started]
    if told:
        return (told[0],)
    noted = [note for record in run.ranks for note in record.notes if note["kind"] == FAILURE]
    if not noted:
        return None
    # Errors of the script first: others are about a rank that failed without a word.
    return tuple(min(noted, key=lambda note: (note["is_of_another"], note["time"]))["ranks"])


NUM_STEPS = 32
"""The pace is the mean of so many steps."""


def pace_of(path: Path) -> dict[str, Any]:
    """Return what the last steps of the rank of a record took, what it logged and does now, as JSON.

    Raises:
        OSError, ReportError: there is no such record.
    """
    record = read_latest(path)
    now = record.now
    # The first one includes the start of the script.
    steps = [step for step in record.steps[-NUM_STEPS:] if step.number > 1] or record.steps
    seconds = fmean(step.seconds for step in steps) if steps else 0.0
    return {
        "steps": now.num_steps,
        "host": record.facts["hostname"],
        "world_size": record.facts["world_size"],
        "step_seconds": seconds,
        "parts": {name: fmean(step.parts[part] for step in steps) if steps else 0.0 for part, name in enumerate(PARTS)},
        "own_seconds": seconds - fmean(step.parts[EXCHANGE] for step in steps) if steps else 0.0,
        "memory_bytes": steps[-1].memory_bytes if steps else 0,
        "samples": fmean(step.samples for step in steps) if steps else 0.0,
        "values": {name: _number(value.own) for name, value in record.values.items() if value.own is not None},
        "means": {name: _number(value.mean) for name, value in record.values.items()},
        "now": PARTS[now.part],
        "seconds_in_step": max(0.0, time.monotonic() - now.step_began),
    }


def _number(value: float) -> float | str:
    """Return a number as JSON, which has none for what is not finite: ``"nan"``, ``"inf"``, ``"-inf"``."""
    return value if math.isfinite(value) else str(value)
