# SPDX-License-Identifier: Apache-2.0
"""Waiting for a send or a receive of Gloo in slices, as the watch does.

A wait of Gloo's that runs out of time closes the connection, and whether it is over cannot be asked. So a thread
waits in one piece, and this rank for the thread. Used by step.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING
from weakref import finalize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

LONGER_SECONDS = 60.0
"""By which the thread waits longer than the watch, which knows more to say."""

END_SECONDS = 5.0
"""How long the thread may take to end its wait."""


class Waiter:
    """A thread that waits for one thing at a time."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._job: _Job | None = None
        self._has_thread = False

    def begin(self, works: Sequence[dist.Work], timeout_seconds: float) -> None:
        """Start waiting for all of ``works``: to hand each to the thread would take longer."""
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=_follow, args=(self._jobs,), name="rankwise-pipeline", daemon=True).start()
            finalize(self, self._jobs.put, None)
        self._job = _Job(works, timeout_seconds + LONGER_SECONDS)
        self._jobs.put(self._job)

    def is_done(self, seconds: float) -> bool:
        """Wait for at most ``seconds``, and return whether it is over; raise what broke it."""
        job = self._job
        if job is None or not job.is_over.acquire(timeout=seconds):
            return job is None
        self._job = None
        if job.error is not None:
            raise job.error
        return True

    def give_up(self, disconnect: Callable[[], None]) -> None:
        """End the wait of the thread: one that is inside torch while the interpreter ends would abort the process."""
        job, self._job = self._job, None
        if job is not None and not job.is_over.acquire(blocking=False):
            disconnect()
            job.is_over.acquire(timeout=END_SECONDS)


class _Job:
    def __init__(self, works: Sequence[dist.Work], limit_seconds: float) -> None:
        self.works = works
        self.limit_seconds = limit_seconds
        self.is_over = threading.Lock()
        self.is_over.acquire()
        self.error: Exception | None = None


def _follow(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            for work in job.works:
                work.wait(timedelta(seconds=job.limit_seconds))
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits for this one
            job.error = error
        job.is_over.release()
        job.works = ()  # and with it goes the memory of what was sent
