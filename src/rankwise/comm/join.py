# SPDX-License-Identifier: Apache-2.0
"""Joining the world: the only place where a process group opens; ``leave`` closes it.

Detects which launcher started this process, finds the others through the store, opens torch's process group and sets
the session. The rooms that users call are built on it; it knows none of them.
"""

from __future__ import annotations

import itertools
import socket
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

from rankwise import meter
from rankwise.comm import optimizer_steps, ray_train
from rankwise.comm.backends.choose import check_exchange, open_exchange
from rankwise.comm.backends.torch_group import TorchGroup
from rankwise.comm.collectives.objects import agree_on_key
from rankwise.comm.leave import fail, hook_exit, leave
from rankwise.comm.point_to_point.endpoint import current_endpoint, watch_ring
from rankwise.comm.session import Session, current_or_none, set_current
from rankwise.comm.world_group import (
    choose_interface,
    open_group,
    open_group_of_one,
)
from rankwise.errors import ConfigurationError
from rankwise.health.collective_timeout import DEFAULT_TIMEOUT_SECONDS
from rankwise.health.event_log import WORLDS_KEY, world_prefix
from rankwise.health.failure_detector import FailureDetector
from rankwise.health.preemption import STOPPED_EXIT_CODE, listen
from rankwise.health.queued_collectives import QueuedCollectives
from rankwise.log import log, speak_as
from rankwise.store import bootstrap
from rankwise.torch_private.groups import abort_groups, have_groups_leaked
from rankwise.world.device import accelerator
from rankwise.world.device.choice import (
    bound_device,
    choose_backend,
    choose_device,
    index_of,
    look_at_devices,
    refuse_unequipped,
    waits_on_device,
)
from rankwise.world.device.streams import is_capturing, let_others_capture
from rankwise.world.environments.process import (
    EXPLICIT,
    asked_device,
    checks_collectives,
    device_mask,
    explicit,
    may_share_gpus,
    read_process,
    stack_file,
)
from rankwise.world.facts import World

if TYPE_CHECKING:
    import os
    from types import TracebackType

    from rankwise.store.bootstrap import Neighbours
    from rankwise.store.client import Store
    from rankwise.world.device.choice import Sight
    from rankwise.world.environments.reading import Reading

_NOT_FAILED = {None, 0, STOPPED_EXIT_CODE}


class JoinedWorld(World):
    """The world as a context manager: leaves when the block ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not a failure: every rank that stopped early and saved exits with STOPPED_EXIT_CODE.
        if error is None or (isinstance(error, SystemExit) and error.code in _NOT_FAILED):
            leave()
        else:
            reason = fail(error)
            if reason is not None and reason is not error:
                raise reason from None


def join(
    backend: str | None = None,
    *,
    device: str | torch.device | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    exchange: str = "auto",
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    report: str | os.PathLike[str] | None = None,
) -> JoinedWorld:
    """Join the world this process was started for, with any launcher.

    Called by: every rank, once, before anything else of rankwise. A plain call, or
    ``with rankwise.join() as world:``; the block's end, or the process's, leaves the world.

    Args:
        backend: ``"nccl"``, ``"gloo"``, or another that torch knows; by default torch's own for the device: NCCL on
            GPUs of NVIDIA and AMD, Gloo on the CPU. ``docs/devices.md`` has the table.
        device: the device of this rank; by default an accelerator of its own, else the CPU.
        init_method: ``tcp://host:port``, ``file:///path`` or ``env://``, when no launcher set its
            variables. The first two need ``rank`` and ``world_size``.
        rank: number of this process, with ``init_method``.
        world_size: number of processes, with ``init_method``.
        exchange: how CPU tensors travel between ranks: ``"shared_memory"`` within a host, ``"gloo"`` always over
            sockets, ``"auto"`` the first if all ranks run on CPUs and it is available, and logs which.
        timeout_seconds: how long a rank waits for the others, here and in every collective, before it raises
            an error that names the missing ones.
        report: a folder that every host writes to: each rank records there where the time of its steps goes, for
            ``rankwise report``. By default the one given to ``rankwise run --report``; ``"off"`` measures nothing.

    Returns:
        The facts about this process. A world of one needs no launcher and opens no process group.

    Raises:
        EnvironmentConflict: two launchers' variables contradict each other.
        ConfigurationError: a bad argument, an incomplete set of variables, a missing GPU, a port in use.
        PeerMissing: some ranks did not join within ``timeout_seconds``.

    Source: torch.distributed.init_process_group.
    """
    _refuse_second_join()
    check_exchange(exchange)
    workers = ray_train.take_over() if init_method is None else None
    try:
        _refuse_other_group()
        reading = _read(init_method, rank, world_size) if workers is None else workers.reading
        number = next(_join_numbers)
        device = device or asked_device()
        if reading.world_size == 1:
            alone = bootstrap.RankAddress(hostname=socket.gethostname(), address=None)
            world = _world(reading, device, backend, bootstrap.Neighbours(on_host={reading.rank: alone}))
            accelerator.use(world.device)
            session = Session(world=world, open_group=partial(open_group_of_one, world))
        else:
            mask = device_mask(accelerator.shown_kind().visible)
            sight = look_at_devices(device, backend, reading.local_rank, mask)
            job_store, serves, neighbours = _join_store(reading, timeout_seconds, number, sight)
            world = _world(reading, device, backend, neighbours)
            # Before torch's group opens: what it does on a device that it was not told, it does on the current one.
            accelerator.use(world.device)
            choose_interface(reading, neighbours)
            object_key = agree_on_key(job_store, bootstrap.secret_of(reading))
            session = _session(world, job_store, timeout_seconds, serves_store=serves, object_key=object_key)
    except ConfigurationError as error:
        # The error says what to change in the script or its start; how join() found that out would be ten lines more.
        raise error.with_traceback(None)  # noqa: B904 - the same error
    finally:
        if workers is not None:
            workers.release()
    set_current(session)
    session.call_last(listen(session.preemption, reading.stop_signals))
    optimizer_steps.follow(session)
    speak_as(str(world) if world.world_size > 1 else "", is_rank_zero=world.rank == 0)
    meter.listener().start(world, report)
    hook_exit()
    if reading.warns or reading.source not in {"nobody", "rankwise"}:  # rankwise's launcher has already logged it
        started = reading.reason
        if not reading.warns and reading.source != EXPLICIT:
            started = f"started by {started.partition(':')[0]}; `rankwise env` shows the variables"
        log(f"{world.world_size} {'rank' if world.world_size == 1 else 'ranks'}: {started}")
    if session.store is not None and isinstance(session.exchange, TorchGroup):
        try:
            _connect(session, session.store, session.exchange, exchange)
        except BaseException as error:
            fail(error)
            raise
    meter.listener().follow(session, partial(_hostnames, session))
    return world


def _refuse_second_join() -> None:
    if current_or_none() is not None:
        raise ConfigurationError(
            "This process has already joined a world.",
            do="call rankwise.join() once; use rankwise.leave() before joining another",
        )


def _refuse_other_group() -> None:
    if dist.is_initialized():
        raise ConfigurationError(
            f"torch.distributed already has a process group{' (of a failed world)' if have_groups_leaked() else ''}.",
            do="let the process end; a launcher restarts all ranks: rankwise run --max-restarts 3"
            if have_groups_leaked()
            else "remove init_process_group(): rankwise.join() opens the group",
        )


def _read(init_method: str | None, rank: int | None, world_size: int | None) -> Reading:
    if init_method is not None:
        return explicit(init_method, rank, world_size)
    if rank is not None or world_size is not None:
        raise ConfigurationError(
            "join() was given rank or world_size without init_method.",
            do='pass init_method="tcp://host:port", rank and world_size together, or none of them',
        )
    return read_process()


def _join_store(reading: Reading, timeout_seconds: float, number: int, sight: Sight) -> tuple[Store, bool, Neighbours]:
    """Return the job's store, whether this process serves it, and where the ranks are."""
    job_store, serves = bootstrap.open_store(reading, timeout_seconds)
    job_store.expect_answers_within(timeout_seconds)
    if number:  # The store may outlive the world that was left.
        job_store.set(WORLDS_KEY, str(number))
        job_store = job_store.prefixed(world_prefix(number))
    try:
        return job_store, serves, bootstrap.exchange_rank_addresses(job_store, reading, timeout_seconds, sight)
    finally:
        if serves:
            bootstrap.forget_port(reading)


def _hostnames(session: Session) -> list[str]:
    """Return the host of every rank."""
    return [session.world.hostname] if session.store is None else bootstrap.hostnames_of_all(session.store)


def _world(
    reading: Reading, device: str | torch.device | None, backend: str | None, neighbours: Neighbours
) -> JoinedWorld:
    ranks = sorted(neighbours.on_host)
    own = neighbours.on_host[reading.rank].hostname
    local_rank = ranks.index(reading.rank) if reading.local_rank is None else reading.local_rank
    index = local_rank if reading.world_size == 1 else _own_index(reading.rank, backend, neighbours)
    chosen = choose_device(device, backend, index)
    return JoinedWorld(
        rank=reading.rank,
        world_size=reading.world_size,
        local_rank=local_rank,
        local_world_size=reading.local_world_size or len(ranks),
        node_rank=neighbours.node_rank if reading.node_rank is None else reading.node_rank,
        num_nodes=reading.num_nodes or neighbours.num_nodes,
        device=chosen,
        backend=choose_backend(backend, chosen) if reading.world_size > 1 else "none",
        hostname=own,
        source=reading.source,
    )


def _own_index(rank: int, backend: str | None, neighbours: Neighbours) -> int:
    """Return which of the devices that a rank sees is its own; raise on every rank if one of them has none."""
    own = neighbours.on_host[rank]
    device = f"{own.sight.kind}:0"
    needs_own = bool(own.sight.kind) and bound_device(device, choose_backend(backend, device)) is not None
    for hostname, on_host in neighbours.unequipped:
        refuse_unequipped(hostname, on_host, may_share=not needs_own or may_share_gpus())
    return index_of(rank, {other: place.sight for other, place in neighbours.on_host.items()})


def _session(
    world: JoinedWorld, job_store: Store, timeout_seconds: float, *, serves_store: bool, object_key: bytes
) -> Session:
    detector = FailureDetector(job_store, world, timeout_seconds, stack_file())
    return Session(
        world=world,
        store=job_store,
        exchange=TorchGroup(detector, world.rank, world.world_size),
        detector=detector,
        object_key=object_key,
        serves_store=serves_store,
        preemption=detector.preemption,
    )


def _connect(session: Session, job_store: Store, ranks: TorchGroup, exchange: str) -> None:
    """Open torch's group of ``ranks``, and the exchange on it."""
    world = session.world
    if waits_on_device(world.device, world.backend):
        _follow_device(session, ranks.detector)
    open_group(world, job_store, ranks.detector)
    chosen, words = open_exchange(exchange, ranks, world, checks=checks_collectives())
    session.use_exchange(chosen)
    if words:
        log(f"exchange: {words}")


def _follow_device(session: Session, detector: FailureDetector) -> None:
    """Have collectives on the device followed: the CPU does not wait for them. Called by: every rank."""
    device = session.world.device

    def prepare() -> None:
        accelerator.use(device)
        let_others_capture(torch.device(device))

    queue = QueuedCollectives(
        detector,
        prepare=prepare,
        abort=abort_groups,
        is_capturing=partial(is_capturing, torch.device(device)),
    )
    detector.follow_device_by(queue)
    queue.watch_peer(watch_ring(current_endpoint("join")))
    session.on_leave(partial(queue.drain, partial(accelerator.synchronize, device)))
    session.at_end(queue.close)


_join_numbers = itertools.count()
"""How often this process has joined before; every rank of a job joins equally often."""
