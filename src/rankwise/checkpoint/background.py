# SPDX-License-Identifier: Apache-2.0
"""A save in the background: a thread of each rank, and what came of it. Imported by the Checkpointer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rankwise.checkpoint.confirm import SLICE_SECONDS
from rankwise.checkpoint.save import write

if TYPE_CHECKING:
    from rankwise.checkpoint.confirm import Ranks
    from rankwise.checkpoint.save import Job


class PendingSave:
    """One save, from the thread's start on."""

    def __init__(self, ranks: Ranks, job: Job) -> None:
        self._error: BaseException | None = None
        # Not a daemon: a process that ends without close() still completes its last checkpoint.
        self._thread = threading.Thread(target=self._run, args=(ranks, job), name="rankwise-checkpoint", daemon=False)
        self._thread.start()

    def _run(self, ranks: Ranks, job: Job) -> None:
        try:
            write(ranks, job)
        except BaseException as error:  # noqa: BLE001 - raised where the main thread waits
            self._error = error

    def ended(self) -> bool:
        """Return whether the save has ended, after waiting a little for it."""
        self._thread.join(SLICE_SECONDS)
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Return when the save is complete, or raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
