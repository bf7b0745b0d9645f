# SPDX-License-Identifier: Apache-2.0
"""Asking every rank what it is doing, over the store, and probing those that do not answer from outside.

The failure detector's thread answers, so the script need not do anything for it. Ranks and the launcher ask.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rankwise.health import process_probe
from rankwise.health.event_log import StatusPoll, post
from rankwise.health.process_probe import Process

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from rankwise.health.diagnosis import Answers
    from rankwise.store.client import Store

ANSWER_SECONDS = 2.0
"""How long ranks may take to answer."""
MOST_LOOKED_AT = 8
"""How many silent ranks one rank probes."""


def call(
    store: Store,
    world_size: int,
    *,
    exchange: str = "",
    sequence: int = 0,
    stacks: str,
    awaited: Collection[int] | None = None,
    first: int = 1,
) -> Answers:
    """Ask every rank what it is doing; ranks that do not answer are absent from the result.

    Waits only for the answers of ``awaited``, by default of all. ``exchange``, ``sequence`` and ``stacks`` are as in
    :class:`rankwise.health.event_log.StatusPoll`. The event log is full below ``first``.
    """
    number = store.add("rankwise/roll_calls", 1)
    post(store, StatusPoll(number, exchange, sequence, stacks), first)
    deadline = time.monotonic() + ANSWER_SECONDS
    answers: Answers = {}
    pending = set(range(world_size))
    essential = pending if awaited is None else set(awaited)
    while True:
        for other in sorted(pending):
            given = store.peek(_key(number, other))
            if given is not None:
                answers[other] = json.loads(given)
        pending -= set(answers)
        if not essential & pending or time.monotonic() > deadline:
            return answers
        # The store's own wait would print a line on stderr for each rank that does not answer.
        time.sleep(0.01)


def answer(store: Store, poll: StatusPoll, rank: int, situation: dict[str, Any]) -> None:
    """Answer a status poll."""
    store.set(_key(poll.number, rank), json.dumps(situation))


def introduce(store: Store, rank: int, process: Process) -> None:
    """Publish which process this rank is, for when it cannot answer itself."""
    store.set(_process_key(rank), json.dumps(asdict(process)))


def take_leave(store: Store, rank: int) -> None:
    """Undo :func:`introduce`: this rank no longer answers, and has not failed."""
    store.delete(_process_key(rank))


def is_introduced(store: Store, rank: int) -> bool:
    """Return whether a rank has joined and not left."""
    return store.check(_process_key(rank))


def process_of(store: Store, rank: int) -> Process | None:
    """Return the process of a rank that has joined and not left."""
    introduced = store.peek(_process_key(rank))
    return None if introduced is None else Process(**json.loads(introduced))


def look_at(store: Store, ranks: Iterable[int]) -> Answers:
    """Probe from outside those silent ranks that run on this host, and return what is found."""
    here = process_probe.this_process()
    found: Answers = {}
    for rank in list(ranks):
        if len(found) == MOST_LOOKED_AT:
            break
        process = process_of(store, rank)
        if process is not None and process.host and process.host == here.host:
            state, stack = process_probe.state_of(process.pid), process_probe.stack_of(process.pid, process.stack_file)
            found[rank] = {"silent": state, "stack": stack}
    return found


def _key(number: int, rank: int) -> str:
    return f"rankwise/roll_calls/{number}/{rank}"


def _process_key(rank: int) -> str:
    return f"rankwise/processes/{rank}"
