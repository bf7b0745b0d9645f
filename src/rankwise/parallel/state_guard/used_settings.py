# SPDX-License-Identifier: Apache-2.0
"""The hyperparameters that one model's optimizers have stepped with since ranks last compared.

Guards compare them in some of the steps, so that a value which differed for one step is found in the next comparison.
What follows the last of these is compared once more before each save and when the world is left, through the store:
a rank that has skipped a step never gets to a collective. Used by guard.
"""

from __future__ import annotations

import contextlib
import zlib
from functools import partial
from typing import TYPE_CHECKING

from rankwise.comm.session import current
from rankwise.parallel.state_guard.diagnosis import check_used, plain
from rankwise.tensors.checksum import settings_bytes

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from rankwise.comm.same_state.posted import Posted
    from rankwise.comm.session import Session


class UsedSettings:
    """What one rank's optimizers have stepped a model with. Keeps neither of them alive."""

    def __init__(self, model_name: str, posted: Posted | None, session: Session) -> None:
        """Have ranks compare before saves and when the world is left.

        Called by: every rank with a copy of the model.
        """
        self._model_name = model_name
        self._compared_at = 0
        self._num_posted = 0
        self.held: dict[str, list[bytes]] = {}
        """What each step has used, by the optimizer: replaced when ranks have compared."""
        if posted is not None:
            session.before_save(partial(self._compare_now, posted))
            session.on_leave(partial(self._compare_now, posted))

    def note_step(self, optimizer: Optimizer, first: int) -> None:
        """Note a step of an optimizer, whose first parameter of the model has the number ``first``."""
        self.held.setdefault(f"{type(optimizer).__name__}/{first}", []).append(settings_bytes(optimizer))

    def start_over(self, step: int) -> None:
        """Forget the steps: ranks have compared, in ``step``."""
        self._compared_at = step
        self.held = {}

    def checksum(self) -> int:
        """Return a checksum of all values; the order of the optimizers does not matter."""
        return sum(zlib.crc32(b"".join(steps), zlib.crc32(key.encode())) for key, steps in self.held.items())

    def _compare_now(self, posted: Posted) -> None:
        """Post what this rank has used since the latest comparison in a step.

        Called by: every rank with a copy of the model, before a save or at the end.

        Raises:
            ReplicasDiffer: on the last rank to get here.
        """
        self._num_posted += 1
        own = {"rank": current().world.rank, "used": plain(self.held)}
        # Whatever waits for a lost store reports it.
        with contextlib.suppress(OSError):
            found = posted.reports(f"used/{self._num_posted}", own)
            if found is not None:
                check_used(self._model_name, list(found.values()), since=self._compared_at)
