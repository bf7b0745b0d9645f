# SPDX-License-Identifier: Apache-2.0
"""Opens torch's process group of the world.

torch connects the ranks in C++ and waits there for each of them, without a look at who has died meanwhile. So a thread
opens the group while the rank's own thread waits as for any collective.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from rankwise.health import process_probe, status_poll
from rankwise.health.collective_timeout import CollectiveWait, PeerEnded
from rankwise.world.device import accelerator
from rankwise.world.device.choice import bound_device, choose_backend, torch_backends
from rankwise.world.environments.process import keep_nccl_from_exiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.health.failure_detector import FailureDetector
    from rankwise.store.client import Store
    from rankwise.world.facts import World

_LOOK_SECONDS = 0.2
_threads: list[threading.Thread] = []
"""The one that has opened a group last, or waits in torch for a rank that has failed."""


def open_group_of_one(world: World) -> None:
    """Open torch's group in a world of one, for torch's own parallel strategies."""
    if not dist.is_initialized():
        backend = choose_backend(None, world.device)
        dist.init_process_group(
            torch_backends(world.device, backend),
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            device_id=bound_device(world.device, backend),
        )


def open_group(world: World, store: Store, detector: FailureDetector) -> None:
    """Open torch's group of all ranks.

    Called by: every rank.

    Raises:
        PeerFailed, PeerMissing: another rank ended, or is not there in time.
    """
    keep_nccl_from_exiting()
    opening = _Opening(partial(_open, world, store, detector.timeout_seconds))
    _threads.clear()
    _threads.append(opening.thread)
    with CollectiveWait(detector, detector.ticket("opening torch's process group")) as wait:
        while not opening.is_done(_LOOK_SECONDS):
            wait.check()
            _check_neighbour(detector)


def is_opening() -> bool:
    """Return whether a thread is inside torch, where it waits for a rank that does not come."""
    return any(thread.is_alive() for thread in _threads)


def _check_neighbour(detector: FailureDetector) -> None:
    """Raise if the process of the rank before this one has exited: there is no connection yet that would break."""
    before = (detector.world.rank - 1) % detector.world_size
    process = status_poll.process_of(detector.store, before)
    is_here = process is not None and process.host == process_probe.this_process().host
    if process is not None and is_here and process_probe.has_exited(process.pid):
        raise PeerEnded(before, process.pid)


def _open(world: World, store: Store, timeout_seconds: float) -> None:
    accelerator.use(world.device)  # The current device is one of the thread's own.
    dist.init_process_group(
        backend=torch_backends(world.device, world.backend),
        store=store.prefixed("group").torch_store,
        rank=world.rank,
        world_size=world.world_size,
        # The failure detector reports first; torch's own timeout ends only what the failure detector could not.
        timeout=timedelta(seconds=timeout_seconds + 10),
        device_id=bound_device(world.device, world.backend),
    )


class _Opening:
    """A thread that opens a group. It does not keep the process from exiting."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="rankwise-opening", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001 - the other thread raises it
            self._error = error

    def is_done(self, seconds: float) -> bool:
        """Wait for at most ``seconds``; return whether the group is open, or raise why it cannot be."""
        self.thread.join(seconds)
        if self.thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True
