# SPDX-License-Identifier: Apache-2.0
"""How ``rankwise stacks`` is answered: what every rank of the running attempt is doing, on all machines of the job.

Ranks are asked over the job's store, and those that do not answer are probed from outside, by the launcher of their
machine; the parts are merged. Changes nothing. Imported by the agent.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwise.health import diagnosis, process_probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rankwise.health.diagnosis import Answers
    from rankwise.store.client import Store

NOT_JOINED = "running, but it has not joined the world yet or has left it"
MOST_AT_ONCE = 16


def look(
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

    def see(rank: int) -> dict[str, Any]:
        pid, path = unanswered[rank], stack_files.get(rank, "")
        state = process_probe.state_of(pid, process_probe.HELD if rank in joined else NOT_JOINED)
        stack = process_probe.stack_of(pid, path, partial(send_signal, rank))
        return {"silent": state, "stack": stack, "host": hostname}

    with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        return {**answers, **dict(zip(unanswered, threads.map(see, unanswered), strict=True))}


def merge(parts: Iterable[Answers]) -> Answers:
    """Return one view from those of several machines: a rank's own answer takes precedence over a probe of it."""
    merged: Answers = {}
    for part in parts:
        for rank, answer in part.items():
            known = merged.get(int(rank))
            if known is None or "silent" in known:
                merged[int(rank)] = answer
    return merged


def as_json(answers: Answers, world_size: int) -> dict[str, Any]:
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
