# SPDX-License-Identifier: Apache-2.0
"""Joining and leaving the world by Horovod's calls, Horovod's variables, and the facts about this process.

Some of the variables are applied here, and the others are logged as without effect.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm import optimizer_steps
from rankwise.comm.collectives import gather_json
from rankwise.comm.join import join
from rankwise.comm.leave import leave
from rankwise.comm.session import current, current_or_none
from rankwise.compat.horovod.exceptions import not_initialized
from rankwise.compat.horovod.process_sets import add_process_set, bind_global, bind_known
from rankwise.compat.horovod.queue import (
    MachinePosition,
    OperationQueue,
    current_queue,
    current_queue_or_none,
    set_current_queue,
)
from rankwise.compat.horovod.request import SetMembers
from rankwise.errors import ConfigurationError
from rankwise.insight.measuring import Timeline
from rankwise.log import log, logger
from rankwise.world.device import accelerator
from rankwise.world.environments import process

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.comm.session import Session
    from rankwise.compat.horovod.process_sets import ProcessSet
    from rankwise.world.facts import World

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
LOG_LEVEL = "HOROVOD_LOG_LEVEL"
LIMIT = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
INTERFACE = "HOROVOD_GLOO_IFACE"
TIMELINE = "HOROVOD_TIMELINE"
DYNAMIC = "DYNAMIC"
"""In place of a file: the script starts the timeline."""
FACTS = {
    f"HOROVOD_{name}"
    for name in (
        *("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME", "ELASTIC"),
        *("CONTROLLER", "CPU_OPERATIONS", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT"),
    )
}
"""Variables that a launcher sets for its ranks; they are not settings of the user."""


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the world, unless it has been joined, and add the given process sets.

    Called by: every rank. It may be called again.

    Args:
        comm: ``None``, or a list of all ranks.
        process_sets: a list of :class:`ProcessSet`, the same on every rank; or ``"dynamic"``, which always holds here.

    Raises:
        ConfigurationError: ``comm`` is anything else; a process set appears twice, or has an unknown rank.

    Source: rankwise.join.
    """
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ConfigurationError(f"process_sets={process_sets!r} is not known.", do='pass a list, or "dynamic"')
        process_sets = None
    given: list[ProcessSet] = list(process_sets or ())
    is_alone = current_or_none() is None
    timeline = _apply_variables(joins=is_alone) if current_queue_or_none() is None else ""
    _check_comm(comm)
    optimizer_steps.stop()  # Horovod's optimizers keep models equal, each among the ranks of its process set.
    if current_queue_or_none() is None:
        _open_queue(timeline, has_opened_world=is_alone)
    for number, process_set in enumerate(given):
        if any(process_set.ranks == other.ranks for other in given[:number]):
            raise ConfigurationError(
                f"Entry {number} of process_sets= appears twice: {process_set}.", do="leave it out"
            )
        if not bind_known(process_set):
            add_process_set(process_set)


def shutdown() -> None:
    """Carry out what is pending on every rank, and leave the world, unless :func:`rankwise.join` was called before.

    Called by: every rank. Does nothing if :func:`init` has not been called. The end of the process calls it, too.

    Source: rankwise.leave.
    """
    queue = current_queue_or_none()
    if queue is None:
        return
    if queue.has_opened_world:
        leave()
    else:
        queue.flush()
        set_current_queue(None)


def is_initialized() -> bool:
    """Return whether :func:`init` has been called, and the world has not been left since."""
    return current_queue_or_none() is not None


def rank() -> int:
    """Return the number of this process."""
    return _world().rank


def size() -> int:
    """Return the number of processes."""
    return _world().world_size


def local_rank() -> int:
    """Return the number of this process among those of its machine."""
    return _world().local_rank


def local_size() -> int:
    """Return the number of processes on this machine."""
    return _world().local_world_size


def cross_rank() -> int:
    """Return the number of this machine among those that have a process with the same local rank."""
    return current_queue().seat.cross_rank


def cross_size() -> int:
    """Return the number of machines that have a process with the same local rank."""
    return current_queue().seat.cross_size


def is_homogeneous() -> bool:
    """Return whether every machine has the same number of processes."""
    return current_queue().seat.is_homogeneous


def mpi_threads_supported() -> bool:
    """Raise, as Horovod does without MPI.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError("rankwise does not use MPI.", do="check hvd.mpi_enabled() first")


def mpi_enabled() -> bool:
    """Return False: mpirun may start the processes, but nothing is sent by MPI."""
    return False


def mpi_built() -> bool:
    """Return False, as :func:`mpi_enabled`."""
    return False


def gloo_enabled() -> bool:
    """Return whether torch's Gloo is available."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def gloo_built() -> bool:
    """Return whether torch was built with Gloo."""
    return gloo_enabled()


def nccl_built() -> int:
    """Return the version of torch's NCCL as one number, or 0."""
    found = accelerator.nccl_version() if accelerator.can_use_nccl() else None
    if found is None:
        return 0
    major, minor, patch = found
    return major * 10000 + minor * 100 + patch


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return whether torch was built with CUDA."""
    return accelerator.has_toolkit("cuda")


def rocm_built() -> bool:
    """Return whether torch was built with ROCm."""
    return accelerator.has_toolkit("hip")


def _world() -> World:
    session = current_or_none()
    if session is None or current_queue_or_none() is None:
        raise not_initialized()
    return session.world


def _apply_variables(*, joins: bool) -> str:
    """Apply Horovod's variables, join the world if ``joins``; return the file of a timeline, or an empty string."""
    wanted = read_settings(process.given_horovod_variables(), has_joined=not joins)
    if wanted.log_level is not None:
        logger.setLevel(wanted.log_level)
    if joins:
        chosen = process.set_interface(wanted.interface, is_loopback=True) if wanted.interface else ()
        try:
            if wanted.limit_seconds is None:
                join()
            else:
                join(timeout_seconds=wanted.limit_seconds)
        except BaseException:
            process.unset(chosen)
            raise
        current().at_end(partial(process.unset, chosen))
    if wanted.without_effect:
        log(f"without effect here: {', '.join(wanted.without_effect)} (docs/from-horovod.md, Variables)")
    return wanted.timeline


def _check_comm(comm: object) -> None:
    num_ranks = current().world.world_size
    if comm is None or (isinstance(comm, Iterable) and sorted(comm) in ([], list(range(num_ranks)))):
        return
    raise ConfigurationError(
        f"comm={comm!r} does not contain all ranks.",
        evidence=f"the ranks are 0 to {num_ranks - 1}",
        do="omit comm=; for some of the ranks pass hvd.init(process_sets=[hvd.ProcessSet([...])]), and "
        "process_set= to the operations",
    )


def _open_queue(timeline: str, *, has_opened_world: bool) -> None:
    session = current()
    world = session.world
    own = (world.node_rank, world.local_rank, world.local_world_size, world.hostname)
    seats = [tuple(seat) for seat in gather_json(own, what="hvd.init()")]
    same_local_rank = sorted(node for node, local, *_ in seats if local == world.local_rank)
    seat = MachinePosition(
        cross_rank=same_local_rank.index(world.node_rank),
        cross_size=len(same_local_rank),
        is_homogeneous=len({num_ranks for _, _, num_ranks, _ in seats}) == 1,
        hostnames=tuple(hostname for *_, hostname in seats),
    )
    everyone = tuple(range(world.world_size))
    members = {0: SetMembers(ranks=everyone, group=None)}
    queue = OperationQueue(session=session, has_opened_world=has_opened_world, seat=seat, members=members)
    session.on_leave(queue.flush)
    set_current_queue(queue)
    bind_global(everyone)
    if timeline:
        start_timeline(timeline)


@dataclass(frozen=True, kw_only=True)
class HorovodSettings:
    """The settings in Horovod's variables."""

    log_level: int | None = None
    limit_seconds: float | None = None
    """The time after which a rank that waits for others raises an error."""
    interface: str = ""
    """The network interface that ranks use."""
    timeline: str = ""
    """The file that the timeline of all ranks is written to."""
    without_effect: tuple[str, ...] = ()
    """Names of variables that are set but have no effect here."""


def read_settings(variables: Mapping[str, str], *, has_joined: bool) -> HorovodSettings:
    """Return the settings in variables; without limit and interface if the world was joined before ``hvd.init()``."""
    given = {name: value.strip() for name, value in variables.items() if name.startswith("HOROVOD_") and value.strip()}
    too_late = {LIMIT, INTERFACE} if has_joined else set[str]()
    honoured = {LOG_LEVEL, LIMIT, INTERFACE, TIMELINE} - too_late
    timeline = given.get(TIMELINE, "")
    return HorovodSettings(
        log_level=_level(given[LOG_LEVEL]) if LOG_LEVEL in given else None,
        limit_seconds=_seconds(given[LIMIT]) if LIMIT in given and not has_joined else None,
        interface="" if has_joined else given.get(INTERFACE, ""),
        timeline="" if timeline == DYNAMIC else timeline,
        without_effect=tuple(sorted(given.keys() - honoured - FACTS)),
    )


def _level(text: str) -> int:
    if text.lower() not in LEVELS:
        raise ConfigurationError(f"{LOG_LEVEL}={text!r} is not a level.", do="set it to one of " + ", ".join(LEVELS))
    return LEVELS[text.lower()]


def _seconds(text: str) -> float | None:
    """Return a limit in seconds; none for 0, as in Horovod."""
    if not text.isdecimal():
        raise ConfigurationError(f"{LIMIT}={text!r} is not a number of seconds.", do="set it to 600, for example")
    return float(text) or None


class _Timelines:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._under_way: Timeline | None = None
        self._number = 0
        session.on_leave(self.stop)

    def start(self, path: Path) -> None:
        if self._under_way is None:
            self._number += 1
            self._under_way = Timeline(self._session, path, self._number, current_queue().seat.hostnames)

    def stop(self) -> None:
        if self._under_way is not None:
            timeline, self._under_way = self._under_way, None
            timeline.stop()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: FBT001, FBT002 - Horovod's arguments
    """Record every step and collective of all ranks, until :func:`stop_timeline` or the end of the world.

    Called by: every rank. Does nothing if a timeline has been started already.

    Args:
        file_path: what rank 0 writes at the end: trace events, for ui.perfetto.dev and chrome://tracing.
        mark_cycles: ignored: there is no background thread with cycles.

    Raises:
        ConfigurationError: :func:`init` has not been called, the file cannot be written, or steps are not measured.

    Source: rankwise.insight.measuring.
    """
    del mark_cycles
    current_queue().session.once(_Timelines).start(Path(file_path))


def stop_timeline() -> None:
    """Write the timeline, if one has been started; rank 0 waits for the parts of the other ranks.

    Called by: every rank.

    Raises:
        ConfigurationError: :func:`init` has not been called.
    """
    current_queue().session.once(_Timelines).stop()
