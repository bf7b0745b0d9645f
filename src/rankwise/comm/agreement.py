# SPDX-License-Identifier: Apache-2.0
"""One rank's error is everyone's error, without ending anybody.

For work that may fail on some rank and where the ranks go on together afterwards: rank-zero work, saving,
preparing data. Built on the collectives; a rank that never comes is named by the failure detector.
"""

from __future__ import annotations

import json
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rankwise.comm.collectives import gather_json
from rankwise.comm.session import current
from rankwise.errors import RankwiseError, fold_values
from rankwise.health.diagnosis import peer_failed

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def all_ranks_succeed(label: str, *, call: str = "all_ranks_succeed()") -> Generator[None]:
    """Run the block on every rank; if it raises anywhere, raise everywhere.

    Called by: every rank, in the same order.

    The rank that failed raises its own error, every other rank raises PeerFailed with that error's text. No process
    ends and the group stays usable: the caller may catch the error and go on.

    Args:
        label: what the block does, for the error: ``"saving"``. It may differ between ranks.
        call: what the ranks are compared by.

    Raises:
        CollectiveMismatch: another rank is in another call.
        PeerFailed: the block failed on another rank; the lowest failing rank is named.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - handed to every rank, then raised
        own = error
    try:
        failures = _share_failure(own, call)
    except RankwiseError as error:
        if own is None:
            raise
        raise error from own
    if own is not None:
        raise own
    if failures:
        rank, failure = min(failures.items())
        raise peer_failed(current().world, rank, **failure, label=label)


def _share_failure(own: Exception | None, call: str) -> dict[int, dict[str, str]]:
    report = None
    if own is not None:
        detail = str(own) if isinstance(own, RankwiseError) else "".join(traceback.format_exception(own))
        report = {"error_type": type(own).__name__, "text": detail}
    reports = gather_json(report, what=call)
    return {rank: report for rank, report in enumerate(reports) if report is not None}


@contextmanager
def local_rank_zero_first(label: str = "local_rank_zero_first") -> Generator[None]:
    """Run the block on the first rank of each machine, then on the others; raise everywhere if it raises.

    Called by: every rank, in the same order. For downloading, unpacking, building a cache: what one process
    of a machine prepares and the others then find ready.

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
        do: what mends a difference.
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
