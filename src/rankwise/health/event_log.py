# SPDX-License-Identifier: Apache-2.0
"""The job's event log, kept in its store: failures, departures, stops, status polls and verdicts, in one order.

Defines and posts events; ``failure_detector`` reads them. The launcher posts for ranks that no longer can.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.store.values import Store

EXPENDABLE_KEY = "rankwise/expendable"
"""Where the launcher, which does not follow the log, finds the optional ranks: a list of numbers, as JSON."""
WORLDS_KEY = "rankwise/worlds"
"""Where the launcher finds how many worlds the ranks have joined after their first; among the keys of the first."""
LOOK_SECONDS = 10.0
"""How long reading an existing key may take."""
_KEY = "rankwise/events/{}"


def key_of(number: int) -> str:
    """Return the store's key of an event; the first is number 1."""
    return _KEY.format(number)


def world_prefix(number: int) -> str:
    """Return the key prefix of a world that was joined after ``number`` others, at least one."""
    return f"join/{number}"


class AppendableLog(Protocol):
    """What an event can be appended to: a store, or the keys themselves in the serving process."""

    def set_if_absent(self, key: str, value: str) -> bool:
        """Set ``key`` unless it exists; return whether it was set."""
        ...


def post(store: AppendableLog, event: dict[str, Any], first: int = 1) -> int:
    """Append an event to the job's log and return its number; the log is known to be full below number ``first``.

    The event is serializable as JSON; ``kind`` is its type.
    """
    text = json.dumps({**event, "token": f"{time.time_ns()}-{id(event)}-{event.get('rank')}"})
    number = first
    while not store.set_if_absent(key_of(number), text):
        number += 1
    return number


def post_failure(store: Store, *, rank: int, error_type: str, text: str, hostname: str = "") -> None:
    """Notify every rank that ``rank`` failed. Called by the rank, or by the launcher in its place.

    ``error_type`` is the exception's class or the signal; ``text`` the traceback, or what is known of the error.
    """
    post(store, {"kind": "failed", "rank": rank, "error_type": error_type, "text": text, "hostname": hostname})


def post_departure(
    store: Store,
    *,
    rank: int,
    exit_code: int | None = None,
    last: int | None = None,
    begun: Mapping[str, int] | None = None,
) -> None:
    """Notify every rank that ``rank`` has exited without an error.

    ``last`` is the number of the last collective it took part in, and ``begun`` how many of each exchange; if known.
    """
    post(store, {"kind": "left", "rank": rank, "exit_code": exit_code, "last": last, "begun": begun or {}})


def post_stop(store: Store, *, reason: str, rank: int | None = None) -> None:
    """Ask every rank to stop at the next step all can agree on. Called by ``rank``, or by the launcher.

    Ranks log the ``reason``, such as ``"SIGUSR2"``.
    """
    post(store, {"kind": "stop_requested", "rank": rank, "reason": reason})


def post_expendable(store: Store, ranks: Sequence[int]) -> None:
    """Declare that the job continues without these ranks if they fail. Called by: any rank, or several alike.

    From then on the failure of one of them is raised only by operations that need it (a collective that it never
    reached, a recv from it, a save that it did not finish). Earlier failures are every rank's error. The job cannot
    continue without all of them. A rank that serves the store itself, as rank 0 does if no rankwise launcher serves it,
    is never optional. Ranks of an earlier call remain optional.
    """
    declared = set[int]()
    if store.check(EXPENDABLE_KEY):
        declared.update(json.loads(store.get(EXPENDABLE_KEY, LOOK_SECONDS)))
    if declared.issuperset(ranks):
        return
    wanted = sorted(declared.union(ranks))
    # The event first: a rank that dies in between ends the job, as seen by the ranks or by the launcher.
    post(store, {"kind": "expendable", "rank": None, "ranks": wanted})
    store.set(EXPENDABLE_KEY, json.dumps(wanted))
