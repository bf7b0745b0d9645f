# SPDX-License-Identifier: Apache-2.0
"""Opens torch's process group of the world, over the network interface that connects its ranks.

torch connects the ranks in C++ and waits there for each of them, without checking which have died meanwhile. So a
thread opens the group while the rank's own thread waits as for any collective.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from rankwise.errors import ConfigurationError, rank_prefix
from rankwise.health import process_probe
from rankwise.health.collective_timeout import CollectiveWait, PeerEnded
from rankwise.store.bootstrap import route_beyond_loopback
from rankwise.world import network
from rankwise.world.device import accelerator
from rankwise.world.device.choice import bound_device, choose_backend, torch_backends
from rankwise.world.environments.process import gloo_interfaces, keep_nccl_from_exiting, set_interface, unset

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.health.failure_detector import FailureDetector
    from rankwise.store.bootstrap import Neighbours
    from rankwise.store.client import Store
    from rankwise.world.environments.reading import Reading
    from rankwise.world.facts import World

_OPENING_SLICE_SECONDS = 0.2
_threads: list[threading.Thread] = []
"""The one that has opened a group last, or waits in torch for a rank that has failed."""
_interface_variables: list[str] = []
"""The variables set here, which are removed when the world is left."""


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
    neighbour = _Neighbour(detector)
    _threads.clear()
    _threads.append(opening.thread)
    with CollectiveWait(detector, detector.ticket("opening torch's process group")) as wait:
        while not opening.is_done(_OPENING_SLICE_SECONDS):
            wait.check()
            neighbour.check()


def is_opening() -> bool:
    """Return whether a thread is inside torch, where it waits for a rank that does not arrive."""
    return any(thread.is_alive() for thread in _threads)


class _Neighbour:
    """The process of the rank before this one, as long as there is no connection yet that would break with it."""

    def __init__(self, detector: FailureDetector) -> None:
        self._detector = detector
        self._rank = (detector.world.rank - 1) % detector.world_size
        self._process: process_probe.Process | None = None

    def check(self) -> None:
        """Raise if it has exited. Asks the store until it is known: later this machine tells."""
        if self._process is None:
            self._process = process_probe.process_of(self._detector.store, self._rank)
        process = self._process
        is_here = process is not None and process.host == process_probe.this_process().host
        if process is not None and is_here and process_probe.has_exited(process.pid):
            raise PeerEnded(self._rank, process.pid)


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


# -- the network interface --------------------------------------------------------------------------


def choose_interface(reading: Reading, neighbours: Neighbours) -> None:
    """Set the interface of Gloo and NCCL to the one that connects the ranks, unless the user named one."""
    forget_interface()  # from a join that failed
    wrong = set(gloo_interfaces()) - {one.name for one in network.interfaces()}
    if wrong:
        raise ConfigurationError(
            f"GLOO_SOCKET_IFNAME names {', '.join(sorted(wrong))}, which is not an interface of this machine.",
            where=rank_prefix(reading.rank, reading.world_size, socket.gethostname()),
            evidence="\n".join(network.interface_lines()),
            do="unset GLOO_SOCKET_IFNAME: rankwise picks the interface that reaches the other ranks",
        )
    found = common_interface(neighbours, reading.rank, None if reading.address is None else reading.address[0])
    if found is not None:
        name, is_loopback = found
        _interface_variables.extend(set_interface(name, is_loopback=is_loopback))


def forget_interface() -> None:
    """Remove the variables that :func:`choose_interface` has set."""
    unset(_interface_variables)
    _interface_variables.clear()


def common_interface(neighbours: Neighbours, rank: int, store_host: str | None) -> tuple[str, bool] | None:
    """Return the interface that ranks reach each other through, and whether it is loopback.

    On one machine that is loopback; on several it is the one that reaches the store or, if that does not decide (the
    store is on this machine, under a name that resolves to loopback), the one that reaches a rank elsewhere.
    ``store_host`` is ``None`` where the store is a file.

    Returns:
        ``None`` if no interface is found; torch then uses the machine's own hostname, which is not used otherwise.
    """
    own = neighbours.on_host[rank]
    if neighbours.num_nodes == 1 and all(place == own for place in neighbours.on_host.values()):
        return next(((one.name, True) for one in network.interfaces() if one.is_loopback and one.is_up), None)
    route = route_beyond_loopback(store_host)
    for address in neighbours.elsewhere if route is None else ():
        with contextlib.suppress(ConfigurationError):
            return network.route_to(address).interface, False
    return None if route is None else (route.interface, False)
