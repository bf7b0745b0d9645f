# SPDX-License-Identifier: Apache-2.0
"""The job's event log, kept in its store: failures, departures, stops, status polls and verdicts, in one order.

Writes and names events; ``failure_detector`` reads them. The launcher writes for ranks that no longer can.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.store.values import Store

EXPENDABLE_KEY = "rankwise/expendable"
"""Where the launcher, which does not follow the log, finds the ranks that may go: a list of numbers, as JSON."""
WORLDS_KEY = "rankwise/worlds"
"""Where the launcher finds how many worlds the ranks have joined after their first; among the keys of the first."""
LOOK_SECONDS = 10.0
"""How long a key that is there may take to come."""
_KEY = "rankwise/events/{}"


def key_of(number: int) -> str:
    """Return the store's key of an event; the first is number 1."""
    return _KEY.format(number)


def world_prefix(number: int) -> str:
    """Return what the keys begin with of a world that was joined after ``number`` others, at least one."""
    return f"join/{number}"


class AppendableLog(Protocol):
    """What an event can be appended to: a store, or the keys themselves in the process that serves them."""

    def set_if_absent(self, key: str, value: str) -> bool:
        """Set ``key`` unless it is there already; return whether it was set."""
        ...


def post(store: AppendableLog, event: dict[str, Any], first: int = 1) -> int:
    """Append an event to the job's log and return its number.

    Args:
        store: any connection to the job's store.
        event: JSON-able; ``kind`` says what it is.
        first: a number below which the log is known to be full.
    """
    text = json.dumps({**event, "token": f"{time.time_ns()}-{id(event)}-{event.get('rank')}"})
    number = first
    while not store.set_if_absent(key_of(number), text):
        number += 1
    return number


def post_failure(store: Store, *, rank: int, error_type: str, text: str, hostname: str = "") -> None:
    """Tell every rank that ``rank`` failed. Called by the rank, or by the launcher in its place.

    Args:
        store: any connection to the job's store.
        rank: who failed.
        error_type: name of the exception class, or of the signal.
        text: the traceback, or what is known.
        hostname: where it ran.
    """
    post(store, {"kind": "failed", "rank": rank, "error_type": error_type, "text": text, "hostname": hostname})


def post_departure(
    store: Store, *, rank: int, exit_code: int | None = None, last: int | None = None, counts: Sequence[int] = ()
) -> None:
    """Tell every rank that ``rank`` has ended without an error.

    Args:
        store: any connection to the job's store.
        rank: who left.
        exit_code: of its process, where it has ended.
        last: number of the last collective it took part in; ``None`` where that is not known.
        counts: how many collectives of each exchange it took part in, where that is known.
    """
    post(store, {"kind": "left", "rank": rank, "exit_code": exit_code, "last": last, "counts": list(counts)})


def post_stop(store: Store, *, reason: str, rank: int | None = None) -> None:
    """Ask every rank to stop at the next step all can agree on. Called by a rank, or by the launcher.

    Args:
        store: any connection to the job's store.
        reason: what ranks say about it: ``"SIGUSR2"``.
        rank: who asks, where it is a rank.
    """
    post(store, {"kind": "stop_requested", "rank": rank, "reason": reason})


def post_expendable(store: Store, ranks: Sequence[int]) -> None:
    """Declare that the job goes on without these ranks, should they fail. Called by: any rank, or several alike.

    From then on the failure of one is not everyone's error: what needs that rank raises it (a collective that it
    never came to, a recv from it, a save that it did not finish), and nothing else does. What failed before is
    everyone's error. All of them together cannot be gone on without. A rank that serves the store itself, as rank 0
    does where no launcher of ours serves it, cannot be gone on without.

    Args:
        store: any connection to the job's store.
        ranks: their numbers; those of an earlier call stay expendable.
    """
    declared = set[int]()
    if store.check(EXPENDABLE_KEY):
        declared.update(json.loads(store.get(EXPENDABLE_KEY, LOOK_SECONDS)))
    if declared.issuperset(ranks):
        return
    wanted = sorted(declared.union(ranks))
    # The event first: whoever dies in between ends the job, in the ranks' eyes or in the launcher's.
    post(store, {"kind": "expendable", "rank": None, "ranks": wanted})
    store.set(EXPENDABLE_KEY, json.dumps(wanted))
