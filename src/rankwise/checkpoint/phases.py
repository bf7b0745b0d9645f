# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a save or a load confirm each step to each other.

Two ways with one meaning: through the collectives, and through the store for a thread that must not touch the process
group. Knows nothing of checkpoints.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rankwise.comm.agreement import outcome_of, results_of_all, values_of
from rankwise.comm.session import current_or_none
from rankwise.errors import PeerMissing, RankwiseError, fold_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.comm.session import Session
    from rankwise.store.values import Store

T = TypeVar("T")

SLICE_SECONDS = 0.5
"""How long a thread waits for a peer before it checks whether the job is still running."""
GRACE_SECONDS = 3.0
"""How long a thread keeps waiting after a rank has failed: that rank's thread may still finish."""


class CheckpointRanks(Protocol):
    """The participating ranks, and a way to do a step together."""

    @property
    def rank(self) -> int: ...  # noqa: D102 - as of the world

    @property
    def world_size(self) -> int: ...  # noqa: D102 - as of the world

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


class CollectiveRanks:
    """All ranks of the session, through the collectives; without a session, as in a notebook, this process alone."""

    def __init__(self, session: Session | None) -> None:
        self.rank, self.world_size = (0, 1) if session is None else (session.world.rank, session.world.world_size)
        self._is_alone = session is None

    def confirm(self, label: str, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank. As :meth:`CheckpointRanks.confirm`."""
        return [work()] if self._is_alone else results_of_all(label, work, call="saving or loading")


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
        """Do ``work`` on every rank. As :meth:`CheckpointRanks.confirm`."""
        step = self._step
        self._step += 1
        own = outcome_of(work)
        self.store.set(self._key(step, self.rank), json.dumps(own[0]))
        return values_of(label, own, self._gather(label, step), self._session.world)

    def forget(self) -> None:
        """Delete this rank's reports from the store. Only when every rank has finished the last step."""
        for step in range(self._step):
            self.store.delete(self._key(step, self.rank))

    def _key(self, step: int, rank: int) -> str:
        return f"rankwise/checkpoint/{self._name}/{step}/{rank}"

    def _gather(self, label: str, step: int) -> list[list[Any]]:
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
            f"{label} timed out after {waited:.1f} s waiting for "
            + (f"{fold_ranks(missing)}." if missing else "ranks that have arrived since."),
            ranks=missing,
            where=f"reported on {self._session.world}",
            do="check the output of the missing rank; if its disk is slow, raise join(timeout_seconds=...)",
        )

    def _cause(self, keys: list[str]) -> RankwiseError | None:
        """Return why the others will not arrive: what ended the job, or the loss of an optional rank."""
        detector = self._session.detector
        if detector is None or detector.error is not None or not detector.has_lost_ranks:
            return None if detector is None else detector.error
        return next(filter(None, map(detector.loss_of, self._missing(keys))), None)

    def _missing(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self.store.check(key)]
