# SPDX-License-Identifier: Apache-2.0
"""How ``rankwise top`` is answered: the pace of ranks, from the records that they keep, and one line about all of them.

The ranks are not asked, and notice nothing. Imported by the service that answers, and by those that show the line.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankwise.errors import ReportError, fold_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from rankwise.health.diagnosis import Answers

PACE = "rankwise.insight.run_records"
"""What reads the record of a rank, by name: the core imports no room of the rest."""


def paces(paths: Mapping[int, Path]) -> Answers:
    """Return what the last steps of each rank took, what it logged and does now; only of ranks with a record."""
    pace_of = import_module(PACE).pace_of
    found: Answers = {}
    for rank, path in paths.items():
        with contextlib.suppress(OSError, ReportError):
            found[rank] = pace_of(path)
    return found


def as_json(parts: Iterable[Answers], unanswered: Sequence[str]) -> dict[str, Any]:
    """Return the answer to ``rankwise top`` as JSON.

    Args:
        parts: the paces of the ranks of each machine.
        unanswered: the names of the machines whose paces are missing.
    """
    ranks = dict(sorted((rank, dict(pace)) for part in parts for rank, pace in part.items()))
    # The same on all ranks, but for the last second.
    means = [pace.pop("means") for pace in ranks.values()]
    return {
        "ranks": {str(rank): pace for rank, pace in ranks.items()},
        "values": means[0] if means else {},
        "unanswered": list(unanswered),
    }


def number_text(value: float | str) -> str:
    """Return a logged value, as it is in the answer, for people."""
    return value if isinstance(value, str) else f"{value:.4g}"


def num_hosts(answer: dict[str, Any]) -> int:
    """Return how many machines the job has, as far as they are known by different names."""
    return len({*(pace["host"] for pace in answer["ranks"].values()), *answer["unanswered"]})


def line_of(answer: dict[str, Any]) -> str:
    """Return the answer as one line: pace, logged values, slowest rank; empty at first."""
    ranks = answer["ranks"]
    seconds = max((pace["step_seconds"] for pace in ranks.values()), default=0.0)
    if not seconds:
        return ""
    words = [f"step {min(pace['steps'] for pace in ranks.values())}", f"{1 / seconds:.1f} steps/s"]
    for name, value in answer["values"].items():
        words.append(f"{name} {number_text(value)}{_origin(name, ranks)}")
    if len(ranks) > 1:
        slowest = max(ranks, key=lambda rank: ranks[rank]["own_seconds"])
        at = f" on {ranks[slowest]['host']}" if num_hosts(answer) > 1 else ""
        words.append(f"slowest: rank {slowest}{at}")
    return ", ".join([*words, *([unanswered_line(answer)] if answer["unanswered"] else [])])


def unanswered_line(answer: dict[str, Any]) -> str:
    """Return which machines did not answer, as a sentence without its end."""
    return f"{', '.join(dict.fromkeys(answer['unanswered']))} did not answer"


def _origin(name: str, ranks: dict[str, Any]) -> str:
    """Return on which ranks a logged value is not finite, in parentheses; empty if on none or all."""
    found = [int(rank) for rank, pace in ranks.items() if isinstance(pace["values"].get(name), str)]
    return f" ({fold_ranks(found)})" if 0 < len(found) < len(ranks) else ""
