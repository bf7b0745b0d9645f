# SPDX-License-Identifier: Apache-2.0
"""How far the clocks of other hosts are ahead of rank zero's, as measured over the job's store.

Source: Cristian, "Probabilistic clock synchronization", Distributed Computing 3 (1989): an answer was sent between the
request and its receipt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.store.values import Store

NUM_PINGS = 8


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
