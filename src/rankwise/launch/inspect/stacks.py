# SPDX-License-Identifier: Apache-2.0
"""How ``rankwise stacks`` and ``rankwise top`` are answered: what every rank is doing, and how fast it is.

For its stack a rank is asked over the job's store; one that does not answer is probed from outside, by the launcher of
its machine. Its pace is read from the record that it keeps: it is not asked, and notices nothing. The parts of all
machines are merged. Changes nothing. Imported by the agent, and by the command line, which shows the pace.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankwise.errors import ReportError, fold_ranks
from rankwise.health import diagnosis, process_probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from rankwise.health.diagnosis import Answers
    from rankwise.store.client import Store

NOT_JOINED = "running, but it has not joined the world yet or has left it"
MOST_AT_ONCE = 16
PACE = "rankwise.insight.run_records"
"""What reads the record of a rank, by name: the core imports no room of the rest."""


def stacks_here(
    store: Store,
    world_size: int,
    *,
    processes: Mapping[int, int],
    stack_files: Mapping[int, str],
    hostname: str,
    send_signal: Callable[[int, int], None],
) -> Answers:
    """Ask ranks over the attempt's store, and probe those of this machine that do not answer, by process id."""
    answers = process_probe.poll_ranks(store, world_size, stacks="all", awaited=processes.keys())
    unanswered = {rank: pid for rank, pid in processes.items() if rank not in answers}
    if not unanswered:
        return answers
    joined = {rank for rank in unanswered if process_probe.is_introduced(store, rank)}

    def probe(rank: int) -> dict[str, Any]:
        pid, path = unanswered[rank], stack_files.get(rank, "")
        state = process_probe.state_of(pid, process_probe.HELD if rank in joined else NOT_JOINED)
        stack = process_probe.stack_of(pid, path, partial(send_signal, rank))
        return {"silent": state, "stack": stack, "host": hostname}

    with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        return {**answers, **dict(zip(unanswered, threads.map(probe, unanswered), strict=True))}


def merged_stacks(parts: Iterable[Answers]) -> Answers:
    """Return one view from those of several machines: a rank's own answer takes precedence over a probe of it."""
    merged: Answers = {}
    for part in parts:
        for rank, answer in part.items():
            known = merged.get(int(rank))
            if known is None or "silent" in known:
                merged[int(rank)] = answer
    return merged


def stacks_as_json(answers: Answers, world_size: int) -> dict[str, Any]:
    """Return the answer to ``rankwise stacks`` as JSON: the text for people, and the answer of each rank."""
    return {
        "text": text(answers, world_size),
        "world_size": world_size,
        "ranks": {str(rank): answers[rank] for rank in sorted(answers)},
    }


def text(answers: Answers, world_size: int) -> str:
    """Return the table of all ranks, and all their stacks."""
    shown = diagnosis.stacks(answers, range(world_size), is_wanted_of_all=True, most=world_size)
    return f"{diagnosis.table(answers, world_size)}\n{shown}".strip() + "\n"


# -- rankwise top --------------------------------------------------------------------------------------------


def paces(paths: Mapping[int, Path]) -> Answers:
    """Return what the last steps of each rank took, what it logged and does now; only of ranks with a record."""
    pace_of = import_module(PACE).pace_of
    found: Answers = {}
    for rank, path in paths.items():
        with contextlib.suppress(OSError, ReportError):
            found[rank] = pace_of(path)
    return found


def steps_as_json(parts: Iterable[Answers], unanswered: Sequence[str]) -> dict[str, Any]:
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
