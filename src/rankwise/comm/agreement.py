# SPDX-License-Identifier: Apache-2.0
"""One rank's error is raised on every rank, without ending any process.

For work that may fail on some rank and after which the ranks continue together: rank-zero work, saving,
preparing data. Built on the collectives; the failure detector names a rank that never arrives.
"""

from __future__ import annotations

import json
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rankwise.comm.collectives import gather_json
from rankwise.comm.session import current
from rankwise.errors import RankwiseError, fold_values
from rankwise.health.diagnosis import peer_failed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rankwise.world.facts import World

T = TypeVar("T")

Outcome = tuple[list[Any], Exception | None]
"""The outcome of a rank's work: its value, or its error's type and text, as JSON; and the error itself."""


@contextmanager
def all_ranks_succeed(label: str, *, call: str = "all_ranks_succeed()") -> Generator[None]:
    """Run the block on every rank; if it raises anywhere, raise everywhere.

    Called by: every rank, in the same order.

    The rank that failed raises its own error, every other rank raises PeerFailed with that error's text. No process
    ends and the group stays usable: the caller may catch the error and continue.

    Args:
        label: what the block does, for the error: ``"saving"``. It may differ between ranks.
        call: the call that ranks are compared by.

    Raises:
        CollectiveMismatch: another rank is in another call.
        PeerFailed: the block failed on another rank; the lowest failing rank is named.
    """
    try:
        yield
        own: Outcome = [None], None
    except Exception as error:  # noqa: BLE001 - handed to every rank, then raised
        own = _failure(error)
    _share(label, own, call)


def results_of_all(label: str, work: Callable[[], T], *, call: str) -> list[T]:
    """Do as :func:`all_ranks_succeed`, and return what ``work`` returns on each rank, in rank order.

    Called by: every rank, in the same order. ``work`` returns something JSON-able.
    """
    return _share(label, outcome_of(work), call)


def outcome_of(work: Callable[[], object]) -> Outcome:
    """Do ``work``, and return its outcome."""
    try:
        return [work()], None
    except Exception as error:  # noqa: BLE001 - handed to every rank, then raised
        return _failure(error)


def values_of(label: str, own: Outcome, outcomes: Sequence[list[Any]], world: World) -> list[Any]:
    """Return the values of all ranks' outcomes, in rank order; raise this rank's own error as it is.

    Raises:
        PeerFailed: another rank's outcome is an error; the lowest failing rank is named.
    """
    if own[1] is not None:
        raise own[1]
    values: list[Any] = []
    for rank, outcome in enumerate(outcomes):
        if len(outcome) > 1:
            kind, text = outcome
            raise peer_failed(world, rank, error_type=kind, text=text, label=label)
        values += outcome
    return values


def _share(label: str, own: Outcome, call: str) -> list[Any]:
    outcome, error = own
    try:
        outcomes = gather_json(outcome, what=call)
    except RankwiseError as lost:
        if error is None:
            raise
        raise lost from error
    return values_of(label, own, outcomes, current().world)


def _failure(error: Exception) -> Outcome:
    text = str(error) if isinstance(error, RankwiseError) else "".join(traceback.format_exception(error))
    return [type(error).__name__, text], error


@contextmanager
def local_rank_zero_first(label: str = "local_rank_zero_first") -> Generator[None]:
    """Run the block on the first rank of each machine, then on the others; raise everywhere if it raises.

    Called by: every rank, in the same order. For downloading, unpacking, building a cache: work that one
    process of a machine does for the others.

    Args:
        label: what the block does, for the error.

    Raises:
        PeerFailed: the block failed on another rank. If it fails on a first rank, the others do not run it.
    """
    first = current().world.local_rank == 0
    with all_ranks_succeed(label):
        if first:
            yield
    with all_ranks_succeed(label):
        if not first:
            yield


def same_on_all_ranks(label: str, value: object, *, do: str, error: type[RankwiseError]) -> None:
    """Raise the same error on every rank unless ``value`` is equal on all of them.

    Called by: every rank, in the same order.

    Args:
        label: what the value is, for the error: ``"the dataset's length"``.
        value: JSON-able.
        do: how to fix a difference.
        error: the class to raise.
    """
    values = gather_json(json.dumps(value, sort_keys=True), what=f"comparing {label}")
    if len(set(values)) > 1:
        raise error(
            f"{label} differs between ranks.",
            where=f"reported on {current().world}",
            evidence=fold_values(dict(enumerate(values))),
            do=do,
        )
