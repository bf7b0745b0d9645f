# SPDX-License-Identifier: Apache-2.0
"""What has happened in a run beside its steps: failures, restarts, saves, warnings."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from rankwise.errors import fold_ranks
from rankwise.health.step_record import FAILURE

if TYPE_CHECKING:
    from rankwise.insight.run_records import RunRecords


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
