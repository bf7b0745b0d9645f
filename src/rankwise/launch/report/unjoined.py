# SPDX-License-Identifier: Apache-2.0
"""A rank that trains alone although it has peers: its script never joins them.

Follows the steps of optimizers, in a rank that the launcher started. Imported by the worker, which starts
it, and by the coordinator, which repeats the report at the end.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.comm.session import has_joined
from rankwise.log import warn

if TYPE_CHECKING:
    import torch

OTHER_LIBRARIES = ("horovod", "byteps", "deepspeed", "hivemind", "torchft")
"""Libraries that can connect ranks without torch's default process group."""
_WHAT_TO_DO = (
    "use rankwise.join(), rankwise.DataLoader and rankwise.replicate(model), or start one rank: rankwise run -n 1"
)


def watch(world_size: int, note: str) -> None:
    """Report the first optimizer step of this process if it has not joined its peers by then.

    Writes the file ``note`` then, so that the launcher repeats the report at the end, and removes it at the first step
    after the process has joined: a script may train a reference on its own first.
    Called by: one of several ranks, before its script runs.
    """
    from rankwise.comm.step_hooks import Follower, Phase, follow  # noqa: PLC0415 - imports torch

    own_pid = os.getpid()

    class Look(Follower):
        is_alone = False

        def after_step(self, optimizer: torch.optim.Optimizer) -> None:
            if self.is_alone:
                self.is_alone = not forget_if_joined(note)
            elif not has_gradients(optimizer):
                return
            # A process that the script forked is not the rank.
            elif os.getpid() == own_pid and not _is_connected():
                warn(
                    f"rank 0 has taken an optimizer step without joining the other ranks: {world_size} ranks each "
                    f"train alone, and each writes the script's files; {_WHAT_TO_DO}"
                )
                self.is_alone = True
                with contextlib.suppress(OSError):
                    Path(note).touch()
            if not self.is_alone:
                end()

    end = follow(Look(), Phase.WATCH, is_kept=True)


def forget_if_joined(note: str) -> bool:
    """Remove the file ``note`` if this process has joined other ranks since; return whether it has."""
    if not Path(note).exists() or not _is_connected():
        return False
    Path(note).unlink(missing_ok=True)
    return True


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step of ``optimizer`` may have changed parameters."""
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def reminder(world_size: int) -> str:
    """Return the last line of a job whose ranks trained alone."""
    return f"[rankwise] the script never joined: {world_size} ranks each trained alone; {_WHAT_TO_DO}\n"


def _is_connected() -> bool:
    """Return whether this process has joined other ranks in any way."""
    import torch.distributed as dist  # noqa: PLC0415 - in memory already

    if has_joined() or dist.is_initialized():
        return True
    return any(name in sys.modules for name in OTHER_LIBRARIES) or _is_connected_by_rpc()


def _is_connected_by_rpc() -> bool:
    from torch.distributed import rpc  # noqa: PLC0415 - takes a moment, and is needed once

    try:
        rpc.get_worker_info()
    except (AttributeError, RuntimeError):  # not started; or torch was built without it
        return False
    return True
