# SPDX-License-Identifier: Apache-2.0
"""The job's event log, kept in its store: failures, departures, stops, status polls and verdicts, in one order.

``failure_detector`` follows it. The launcher posts for ranks that no longer can.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, get_args

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.store.client import Store

EXPENDABLE_KEY = "rankwise/expendable"
"""Where the launcher, which does not follow the log, finds the optional ranks: a list of numbers, as JSON."""
WORLDS_KEY = "rankwise/worlds"
"""Where the launcher finds how many worlds the ranks have joined after their first; among the keys of the first."""
MOST_REPORTED = 8
"""How many of the first departures all ranks read, and of the first failures, however many ranks have left before: N
events read by N ranks would be N x N messages. The other departures are looked up."""
MOST_LOOKED_UP = 64
"""Of how many ranks the departures are looked up one by one; of more, in the list of all."""
ALL_DEPARTED_KEY = "rankwise/departed/all"
"""Is set once every rank has left or failed."""
_DEPARTED_KEY = "rankwise/departed/{}"
NUM_DEPARTED_KEY = "rankwise/departed/number"
"""Counts the ranks that have left or failed."""
_LISTED_KEY = "rankwise/departed/listed/{}"
_NUM_FAILED_KEY = "rankwise/departed/failures"
"""Counts the failures that end the job."""
EVENT_READ_SECONDS = 10.0
"""How long reading an existing key may take."""
_KEY = "rankwise/events/{}"


def key_of(number: int) -> str:
    """Return the store's key of an event; the first is number 1."""
    return _KEY.format(number)


def world_prefix(number: int) -> str:
    """Return the key prefix of a world that was joined after ``number`` others, at least one."""
    return f"join/{number}"


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank has failed."""

    rank: int
    error_type: str
    """The exception's class, or the signal."""
    text: str
    """The traceback, or what is known of the error."""
    hostname: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """A rank has exited without an error."""

    rank: int
    exit_code: int | None = None
    last: int | None = None
    """The number of the last collective it took part in, if known."""
    begun: dict[str, int] = field(default_factory=dict[str, int])
    """How many of each exchange, by its name."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Every rank is to stop at the next step that all can agree on."""

    reason: str
    """Such as ``"SIGUSR2"``; ranks log it."""
    rank: int | None = None
    """Which asks; ``None``: the launcher."""


@dataclass(frozen=True, slots=True)
class StopAt:
    """Ranks stop at this boundary between steps."""

    boundary: int


@dataclass(frozen=True, slots=True)
class Expendable:
    """The job continues without these ranks if they fail, and without those of earlier events."""

    ranks: list[int]


@dataclass(frozen=True, slots=True)
class StatusPoll:
    """Every rank is to tell what it is doing."""

    number: int
    exchange: str = ""
    """The collective that is asked about: its exchange, by name; empty for that of all ranks."""
    sequence: int = 0
    stacks: str = ""
    """``"missing"`` for the stack of a rank that has not reached it, ``"all"`` for every rank's."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """A wait has timed out, or can never end."""

    what: str
    waited: float
    missing: list[int] = field(default_factory=list[int])
    table: str = ""
    """What every rank was doing."""
    calls: list[list[Any]] = field(default_factory=list[list[Any]])
    """If ranks called different collectives: description, call site, the ranks, and the hosts of the first few."""


@dataclass(frozen=True, slots=True)
class ConnectionBroke:
    """A connection broke for no reported reason."""

    what: str
    gone: list[int]
    """Ranks that no longer exist."""
    have_left: bool
    """Whether all of these had left before."""
    table: str
    """What the others were doing."""
    reason: str
    """The message of torch or of the kernel."""


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The process of a rank has exited for no reported reason."""

    rank: int
    what: str
    process: int


@dataclass(frozen=True, slots=True)
class DetectorEnded:
    """A rank follows the log no more: its own last event."""

    rank: int


Loss = Failed | TimedOut | ConnectionBroke | ProcessEnded
"""Why ranks cannot continue, or continue without some."""
Event = Loss | Left | StopRequested | StopAt | Expendable | StatusPoll | DetectorEnded
_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}


class AppendableLog(Protocol):
    """What an event can be appended to: a store, or the keys themselves in the serving process."""

    def set_if_absent(self, key: str, value: str) -> bool:
        """Set ``key`` unless it exists; return whether it was set."""
        ...

    def set(self, key: str, value: str) -> None:
        """Set ``key``."""
        ...

    def add(self, key: str, number: int) -> int:
        """Add to a counter and return the sum."""
        ...


def post(store: AppendableLog, event: Event, first: int = 1) -> int:
    """Append an event to the job's log and return its number; the log is known to be full below number ``first``."""
    # Two events that are alike are two.
    text = _text_of(event)
    number = first
    while not store.set_if_absent(key_of(number), text):
        number += 1
    return number


def _text_of(event: Event) -> str:
    return json.dumps({"kind": type(event).__name__, "token": f"{time.time_ns()}-{id(event)}", **asdict(event)})


def post_departure(
    log: AppendableLog,
    event: Left | Failed,
    world_size: int,
    first: int = 1,
    *,
    for_all: bool = False,
    again: bool = False,
) -> int:
    """Record that a rank has left or failed, once; all ranks read one of the first of its kind, or ``for_all``.

    With ``again``, they read it too if a departure of that rank was recorded before.

    Returns:
        A number below which the log is full.
    """
    text, number, is_read = _text_of(event), 0, again
    if log.set_if_absent(departed_key(event.rank), text):
        number = log.add(NUM_DEPARTED_KEY, 1)
        if number > MOST_REPORTED and world_size > MOST_LOOKED_UP:
            log.set(listed_key(number), text)
        count = log.add(_NUM_FAILED_KEY, 1) if isinstance(event, Failed) and not for_all else number
        is_read = for_all or count <= MOST_REPORTED
    if is_read:
        first = post(log, event, first) + 1
    if number == world_size:
        log.set(ALL_DEPARTED_KEY, "")
    return first


def departed_key(rank: int) -> str:
    """Return the key of the departure of a rank, as :func:`event_of` reads it."""
    return _DEPARTED_KEY.format(rank)


def listed_key(number: int) -> str:
    """Return the key of a departure by its number, the first is 1; for those that not all ranks read."""
    return _LISTED_KEY.format(number)


def event_of(text: str | bytes) -> Event:
    """Return the event that :func:`post` has written."""
    fields = json.loads(text)
    del fields["token"]
    return _KINDS[fields.pop("kind")](**fields)


def post_expendable(store: Store, ranks: Sequence[int]) -> None:
    """Declare that the job continues without these ranks if they fail. Called by: any rank, or several alike.

    From then on the failure of one of them is raised only by operations that need it (a collective that it never
    reached, a recv from it, a save that it did not finish). Earlier failures are every rank's error. The job cannot
    continue without all of them. A rank that serves the store itself, as rank 0 does if no rankwise launcher serves it,
    is never optional. Ranks of an earlier call remain optional.
    """
    declared = set[int]()
    if store.check(EXPENDABLE_KEY):
        declared.update(json.loads(store.get(EXPENDABLE_KEY, EVENT_READ_SECONDS)))
    if declared.issuperset(ranks):
        return
    wanted = sorted(declared.union(ranks))
    # The event first: a rank that dies in between ends the job, as seen by the ranks or by the launcher.
    post(store, Expendable(wanted))
    store.set(EXPENDABLE_KEY, json.dumps(wanted))
