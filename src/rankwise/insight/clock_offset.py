# SPDX-License-Identifier: Apache-2.0
"""How far the clocks of other hosts are ahead of rank zero's, as measured over the job's store.

Source: Cristian, "Probabilistic clock synchronization", Distributed Computing 3 (1989): an answer was sent between the
request and its receipt.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.insight.step_record import RecordFile
    from rankwise.store.client import Store

NUM_PINGS = 8
CLOCK_SECONDS = 10.0
"""How long an answer about a clock may take."""


def clock_ahead(
    store: Store, rank: int, asking: Sequence[int], clock: Callable[[], float], timeout_seconds: float
) -> tuple[float, float] | None:
    """Return the largest error, and how far this rank's clock is ahead of rank zero's, in seconds.

    Called by: rank zero, and every rank of ``asking``, which take turns. Others return ``None`` at once, as rank zero
    does when it has answered all.

    Args:
        store: keys of this measurement.
        rank: this rank.
        asking: the ranks that compare their clock, such as the first of each other host.
        clock: returns seconds.
        timeout_seconds: how long one answer may take.

    Raises:
        TimeoutError: an answer took longer.
    """
    if rank == 0:
        for other in asking:
            for number in range(NUM_PINGS):
                store.get(f"{other}/{number}/asked", timeout_seconds)
                store.set(f"{other}/{number}/told", repr(clock()))
        return None
    if rank not in asking:
        return None
    # Those before this rank go first.
    patience = timeout_seconds * len(asking)
    return min(_ask(store, f"{rank}/{number}", clock, patience) for number in range(NUM_PINGS))


def _ask(store: Store, key: str, clock: Callable[[], float], timeout_seconds: float) -> tuple[float, float]:
    asked = clock()
    store.set(f"{key}/asked", "")
    told = float(store.get(f"{key}/told", timeout_seconds))
    return ahead_of(asked, told, clock())


def ahead_of(asked: float, told: float, heard: float) -> tuple[float, float]:
    """Return the largest error, and how far the asking clock is ahead of the answering one."""
    return (heard - asked) / 2, (asked + heard) / 2 - told


def note_clock(record: RecordFile, store: Store, rank: int, hostnames: Sequence[str]) -> None:
    """Record how far this host's clock is ahead of rank zero's. Called by: every rank.

    Args:
        record: of this rank.
        store: keys of this measurement, unused so far.
        rank: this rank.
        hostnames: of all ranks.

    Raises:
        TimeoutError: a rank did not answer.
    """
    own = hostnames.index(hostnames[rank])
    others = [first for name in dict.fromkeys(hostnames) if (first := hostnames.index(name))]
    measured = _clock_of_host(store, rank, own, others) if others else None
    if measured is not None:
        error, ahead = measured
        record.note({"kind": "clock", "ahead": ahead, "error": error})


def _clock_of_host(store: Store, rank: int, first: int, others: Sequence[int]) -> tuple[float, float] | None:
    """Return the error, and how far this host's clock is ahead of rank zero's; ``None`` on rank zero's host."""
    measured = clock_ahead(store, rank, others, time.monotonic, CLOCK_SECONDS)
    if measured is not None:
        store.set(f"host/{rank}", json.dumps(measured))
    elif first:
        error, ahead = json.loads(store.get(f"host/{first}", CLOCK_SECONDS * len(others)))
        measured = error, ahead
    return measured
