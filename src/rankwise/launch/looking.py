# SPDX-License-Identifier: Apache-2.0
"""What every rank of a running attempt is doing: asked over the store, and seen from outside where they are silent.

Each machine's launcher looks at its own ranks; the parts are put together. Changes nothing. Imported by the agent and
the command line.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwise import blame, roll_call, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rankwise.blame import Answers
    from rankwise.store import Store

NOT_JOINED = "it runs, and has not joined the world yet or has left it"
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
    """Return what ranks are doing: all that answer, and those of this machine that do not. Takes up to 4 seconds.

    Args:
        store: of the attempt, a connection of this thread's.
        world_size: number of ranks.
        processes: process number of each rank of this machine that runs.
        stack_files: what each of these writes its stack into.
        hostname: of this machine.
        send_signal: sends a rank of this machine a signal: rank, number.
    """
    answers = roll_call.call(store, rank=-1, world_size=world_size, asked={"stacks": "all"}, awaited=processes.keys())
    unanswered = {rank: pid for rank, pid in processes.items() if rank not in answers}
    if not unanswered:
        return answers

    joined = {rank for rank in unanswered if roll_call.is_introduced(store, rank)}

    def see(rank: int) -> dict[str, Any]:
        pid, path = unanswered[rank], stack_files.get(rank, "")
        state = silent.state_of(pid, silent.HELD if rank in joined else NOT_JOINED)
        stack = silent.stack_of(pid, path, partial(send_signal, rank))
        return {"silent": state, "stack": stack, "host": hostname}

    with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        return {**answers, **dict(zip(unanswered, threads.map(see, unanswered), strict=True))}


def merge(parts: Iterable[Answers]) -> Answers:
    """Return one view from those of several machines: what a rank said itself counts before what was seen of it."""
    merged: Answers = {}
    for part in parts:
        for rank, answer in part.items():
            known = merged.get(int(rank))
            if known is None or "silent" in known:
                merged[int(rank)] = answer
    return merged


def told(answers: Answers, world_size: int) -> dict[str, Any]:
    """Return what ``rankwise stacks`` is answered, as JSON: the text for a person, and what each rank said."""
    return {
        "text": text(answers, world_size),
        "world_size": world_size,
        "ranks": {str(rank): answers[rank] for rank in sorted(answers)},
    }


def text(answers: Answers, world_size: int) -> str:
    """Return the table of all ranks, and all their stacks."""
    shown = blame.stacks(answers, range(world_size), is_wanted_of_all=True, most=world_size)
    return f"{blame.table(answers, world_size)}\n{shown}".strip() + "\n"
