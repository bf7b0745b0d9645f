# SPDX-License-Identifier: Apache-2.0
"""One rank's error is raised on every rank, without ending any process.

For work that may fail on some rank and after which the ranks continue together: rank-zero work, saving,
preparing data. Outcomes travel in a collective, where the failure detector names a rank that never arrives; or through
the store, for a thread that must not touch the process group.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rankwise.comm.collectives import gather_json
from rankwise.comm.session import current, current_or_none
from rankwise.errors import PeerMissing, RankwiseError, fold_ranks, fold_values
from rankwise.health.diagnosis import peer_failed
from rankwise.health.traceback_folds import formatted

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rankwise.comm.session import Session
    from rankwise.store.client import Store
    from rankwise.world.facts import World

T = TypeVar("T")

SLICE_SECONDS = 0.5
"""How long a thread waits for a peer before it checks whether the job is still running."""
RANKS_PER_SLICE, MOST_SLICES = 1000, 10
"""In a larger job it waits longer, up to so many times: all ranks wait at the same server."""
GRACE_SECONDS = 3.0
"""How long a thread keeps waiting after a rank has failed: that rank's thread may still finish."""

_VERDICT = "verdict"

_Outcome = tuple[list[Any], Exception | None]
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
        own: _Outcome = [None], None
    except Exception as error:  # noqa: BLE001 - handed to every rank, then raised
        own = _failure(error)
    _share(label, own, call)


def _outcome_of(work: Callable[[], object]) -> _Outcome:
    try:
        return [work()], None
    except Exception as error:  # noqa: BLE001 - handed to every rank, then raised
        return _failure(error)


def _values_of(label: str, own: _Outcome, outcomes: Sequence[list[Any]], world: World | None = None) -> list[Any]:
    """Return the values of all ranks' outcomes, in rank order; raise this rank's own error as it is."""
    if own[1] is not None:
        raise own[1]
    values: list[Any] = []
    for rank, outcome in enumerate(outcomes):
        if len(outcome) > 1:
            kind, text = outcome
            raise peer_failed(world or current().world, rank, error_type=kind, text=text, label=label)
        values += outcome
    return values


def _share(label: str, own: _Outcome, call: str) -> list[Any]:
    outcome, error = own
    try:
        outcomes = gather_json(outcome, what=call)
    except RankwiseError as lost:
        if error is None:
            raise
        raise lost from error
    return _values_of(label, own, outcomes)


def _failure(error: Exception) -> _Outcome:
    text = str(error) if isinstance(error, RankwiseError) else formatted(error)
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


# -- steps in which every rank does its part of a save or a load ---------------------------------------


class CollectiveRanks:
    """All ranks of the session, through the collectives; without a session, as in a notebook, this process alone."""

    def __init__(self, session: Session | None, call: str) -> None:
        """Take part in the steps of a ``call`` of the script, which errors name."""
        self._call = call
        self.rank, self.world_size = (0, 1) if session is None else (session.world.rank, session.world.world_size)
        self._is_alone = session is None

    def confirm(self, label: str, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank; return the results of all, in rank order.

        Called by: every rank, in the same order.

        Args:
            label: what the step does, for the error.
            work: returns something JSON-able.

        Raises:
            PeerFailed: the step failed on another rank. The rank it failed on raises its own error.
        """
        return [work()] if self._is_alone else _share(label, _outcome_of(work), self._call)


class StoreRanks:
    """All ranks of the session, for a thread of each; never touches the process group."""

    def __init__(self, session: Session, store: Store, name: str) -> None:
        """Take part in the steps of one save.

        Args:
            session: of the ranks; its failure detector reports ranks that fail.
            store: a connection for this thread alone.
            name: of the save, the same on every rank and never used before in this job.
        """
        self.rank = session.world.rank
        self.world_size = session.world.world_size
        self._session = session
        self.store = store
        self._name = name
        self._step = 0

    def confirm(self, label: str, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank. As :meth:`CollectiveRanks.confirm`, but only rank zero returns all results.

        The other ranks return their own: N results read by N ranks would be N x N messages.
        """
        step = self._step
        self._step += 1
        own, world = _outcome_of(work), self._session.world
        self.store.set(self._key(step, self.rank), json.dumps(own[0]))
        verdict_key = self._key(step, _VERDICT)
        if self.rank == 0:
            outcomes: list[list[Any]] = self._gather(label, step, self._keys_of(step))
            failed = next((rank for rank, outcome in enumerate(outcomes) if len(outcome) > 1), None)
            self.store.set(verdict_key, json.dumps(None if failed is None else [failed, *outcomes[failed]]))
            return _values_of(label, own, outcomes, world)
        verdict = self._gather(label, step, [verdict_key])[0]
        if own[1] is None and verdict is not None:
            rank, kind, text = verdict
            raise peer_failed(world, rank, error_type=kind, text=text, label=label)
        return _values_of(label, own, [own[0]], world)

    def forget(self) -> None:
        """Delete this rank's reports from the store. Only when every rank has finished the last step."""
        for step in range(self._step):
            self.store.delete(self._key(step, self.rank))
            if self.rank == 0:
                self.store.delete(self._key(step, _VERDICT))

    def _key(self, step: int, rank: int | str) -> str:
        return f"rankwise/checkpoint/{self._name}/{step}/{rank}"

    def _gather(self, label: str, step: int, awaited: list[str]) -> list[Any]:
        """Return the values of keys, once they are set."""
        detector = self._session.detector
        started = time.monotonic()
        limit = detector.timeout_seconds if detector is not None else SLICE_SECONDS
        failed_at: float | None = None
        slice_seconds = SLICE_SECONDS * min(max(1.0, self.world_size / RANKS_PER_SLICE), MOST_SLICES)
        while True:
            try:
                self.store.wait(awaited, slice_seconds)
                return list(map(json.loads, self.store.get_all(awaited)))
            except TimeoutError:
                now = time.monotonic()
            if failed_at is None and (self._cause(step) is not None or current_or_none() is not self._session):
                failed_at = now
            if failed_at is not None and now - failed_at > GRACE_SECONDS:
                raise self._cannot_complete(label, step, now - started)
            if now - started > limit:
                raise self._cannot_complete(label, step, now - started)

    def _cannot_complete(self, label: str, step: int, waited: float) -> RankwiseError:
        cause = self._cause(step)
        if cause is not None:
            return cause
        missing = self._missing(step)
        return PeerMissing(
            f"{label} timed out after {waited:.1f} s waiting for "
            + (f"{fold_ranks(missing)}." if missing else "ranks that have arrived since."),
            ranks=missing,
            where=f"reported on {self._session.world}",
            do="check the output of the missing rank; if its disk is slow, raise join(timeout_seconds=...)",
        )

    def _cause(self, step: int) -> RankwiseError | None:
        """Return why the others will not arrive: what ended the job, or the loss of an optional rank."""
        detector = self._session.detector
        if detector is None or detector.error is not None or not detector.has_lost_ranks:
            return None if detector is None else detector.error
        return next(filter(None, map(detector.loss_of, self._missing(step))), None)

    def _keys_of(self, step: int) -> list[str]:
        return [self._key(step, rank) for rank in range(self.world_size)]

    def _missing(self, step: int) -> list[int]:
        keys, verdict = self._keys_of(step), self._key(step, _VERDICT)
        there = self.store.peek_all([*keys, verdict])
        missing = [rank for rank, key in enumerate(keys) if key not in there]
        # Rank 0 has not finished the step before its verdict, which the others wait for.
        return missing or ([0] if self.rank != 0 and verdict not in there else [])


CheckpointRanks = CollectiveRanks | StoreRanks
"""The ranks of a save or a load, and a way to do a step together."""
