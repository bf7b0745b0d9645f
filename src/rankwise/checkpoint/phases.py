# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a save or a load confirm each step to each other.

Three ways with one meaning: alone, through the collectives, and through the store for a thread that
must not touch the process group. Knows nothing of checkpoints. Imported by the other files of this
room.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rankwise.comm.agreement import all_ranks_succeed
from rankwise.comm.collectives import gather_json
from rankwise.comm.session import current_or_none
from rankwise.errors import PeerMissing, RankwiseError, fold_ranks
from rankwise.health.diagnosis import peer_failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.comm.session import Session
    from rankwise.store.values import Store

T = TypeVar("T")

SLICE_SECONDS = 0.5
"""How long a thread waits for a peer before it looks whether the job still goes on."""
GRACE_SECONDS = 3.0
"""How long a thread waits on after a rank has failed: that rank's thread may still finish."""


class CheckpointRanks(Protocol):
    """The ranks that take part, and a way to do a step together."""

    @property
    def rank(self) -> int:
        """Number of this one."""
        ...

    @property
    def world_size(self) -> int:
        """How many there are."""
        ...

    def confirm(self, label: str, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank; return the results of all, in rank order.

        Called by: every rank, in the same order.

        Args:
            label: what the step does, for the error.
            work: returns something JSON-able.

        Raises:
            PeerFailed: the step failed on another rank. The rank it failed on raises its own error.
        """
        ...


class SingleRank:
    """No other rank, and no world joined: for loading in a notebook."""

    rank = 0
    world_size = 1

    def confirm(self, label: str, work: Callable[[], T]) -> list[T]:
        """Do ``work``. As :meth:`CheckpointRanks.confirm`."""
        del label
        return [work()]


class CollectiveRanks:
    """All ranks of the session, through the collectives."""

    def __init__(self, session: Session) -> None:
        self.rank = session.world.rank
        self.world_size = session.world.world_size

    def confirm(self, label: str, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank. As :meth:`CheckpointRanks.confirm`."""
        with all_ranks_succeed(label):
            result = work()
        return gather_json(result, what="saving or loading")


class StoreRanks:
    """All ranks of the session, for a thread of each; never touches the process group."""

    def __init__(self, session: Session, store: Store, name: str) -> None:
        """Take part in the steps of one save.

        Args:
            session: of the ranks; its failure detector tells of ranks that fail.
            store: a connection of the thread's own.
            name: of the save, the same on every rank and never used before in this job.
        """
        self.rank = session.world.rank
        self.world_size = session.world.world_size
        self._session = session
        self.store = store
        self._name = name
        self._step = 0

    def confirm(self, label: str, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank. As :meth:`CheckpointRanks.confirm`."""
        step = self._step
        self._step += 1
        own: Exception | None = None
        report: dict[str, Any] = {}
        try:
            report["value"] = work()
        except Exception as error:  # noqa: BLE001 - told to every rank, then raised
            own = error
            report["error"] = {"error_type": type(error).__name__, "text": str(error)}
        self.store.set(self._key(step, self.rank), json.dumps(report))
        reports = self._gather(label, step)
        if own is not None:
            raise own
        for rank, other in enumerate(reports):
            if "error" in other:
                raise peer_failed(self._session.world, rank, **other["error"], label=label)
        return [other["value"] for other in reports]

    def forget(self) -> None:
        """Delete this rank's reports from the store. Only when every rank has ended the last step."""
        for step in range(self._step):
            self.store.delete(self._key(step, self.rank))

    def _key(self, step: int, rank: int) -> str:
        return f"rankwise/checkpoint/{self._name}/{step}/{rank}"

    def _gather(self, label: str, step: int) -> list[dict[str, Any]]:
        keys = [self._key(step, rank) for rank in range(self.world_size)]
        detector = self._session.detector
        started = time.monotonic()
        limit = detector.timeout_seconds if detector is not None else SLICE_SECONDS
        failed_at: float | None = None
        while True:
            try:
                self.store.wait(keys, SLICE_SECONDS)
                return [json.loads(self.store.get(key, SLICE_SECONDS)) for key in keys]
            except TimeoutError:
                now = time.monotonic()
            if failed_at is None and (self._cause(keys) is not None or current_or_none() is not self._session):
                failed_at = now
            if failed_at is not None and now - failed_at > GRACE_SECONDS:
                raise self._cannot_complete(label, keys, now - started)
            if now - started > limit:
                raise self._cannot_complete(label, keys, now - started)

    def _cannot_complete(self, label: str, keys: list[str], waited: float) -> RankwiseError:
        cause = self._cause(keys)
        if cause is not None:
            return cause
        missing = self._missing(keys)
        return PeerMissing(
            f"{label} waited {waited:.1f} s in vain. Missing: "
            + (f"{fold_ranks(missing)}." if missing else "nobody now."),
            ranks=missing,
            where=f"reported on {self._session.world}",
            do="look at the missing rank's output; where its disk is slow, join(timeout_seconds=...) is the limit",
        )

    def _cause(self, keys: list[str]) -> RankwiseError | None:
        """Return why the rest will not come: what ended the job, or the loss of a rank that it goes on without."""
        detector = self._session.detector
        if detector is None or detector.error is not None or not detector.has_lost_ranks:
            return None if detector is None else detector.error
        return next(filter(None, map(detector.loss_of, self._missing(keys))), None)

    def _missing(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self.store.check(key)]
