# SPDX-License-Identifier: Apache-2.0
"""The process groups that torch keeps in this process.

Including groups that only their own ranks know, and groups that outlive their world: their pending operations may
never end.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch


_COUNTS_CALLS = "group_count" in dist.distributed_c10d._hash_ranks_to_str.__code__.co_names  # noqa: SLF001
"""Whether torch names such a group after how often this rank has opened one (from 2.14 on), or how many it is in."""
_FIRST_NUMBER = 1 << 20
"""Larger than torch's own counter gets: the names do not collide with a script's own groups."""


class _OpenedGroups:
    """The groups that this process has opened, and those it has leaked."""

    next_number = 0
    have_leaked = False


_opened = _OpenedGroups()


def open_groups() -> list[object]:
    """Return every process group that is open."""
    return list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001


def next_number() -> int:
    """Return the smallest valid number for the name of this rank's next group among some ranks."""
    return _opened.next_number if _COUNTS_CALLS else len(dist.distributed_c10d._world.pg_names)  # noqa: SLF001


def open_among(ranks: Sequence[int], own: int, number: int) -> object:
    """Open a group of some ranks of the world, unknown to all other ranks.

    Called by: every rank of ``ranks``, each as ``own``. ``number`` goes into the name of the group: the largest
    :func:`next_number` of its ranks.

    Returns:
        torch's group. torch's count of groups of the whole world is unchanged: ranks that open different numbers of
        such groups can still open one together.
    """
    world = dist.distributed_c10d._world  # noqa: SLF001
    with unbound() as device:
        if not _COUNTS_CALLS:
            while len(world.pg_names) < number:
                dist.new_group([own], use_local_synchronization=True)
            return dist.new_group(list(ranks), use_local_synchronization=True, device_id=device)
        counted = world.group_count
        world.group_count = _FIRST_NUMBER + number
        try:
            return dist.new_group(list(ranks), use_local_synchronization=True, device_id=device)
        finally:
            world.group_count = counted
            _opened.next_number = number + 1


@contextlib.contextmanager
def unbound() -> Generator[torch.device | None]:
    """Open the groups of the block as communicators of their own; yield the device that the world's group is bound to.

    torch splits a group from a bound world's communicator, by ``ncclCommSplit``, which every rank of the world must
    call. Ranks outside a group that only its own ranks know would never call it, so those inside would hang.
    Source: torch 2.8 to 2.15's ``_new_process_group_helper``, which splits only if ``bound_device_id`` is set.
    """
    of_world = dist.group.WORLD
    device = None if of_world is None else of_world.bound_device_id
    if of_world is None or device is None:
        yield None
        return
    of_world.bound_device_id = None
    try:
        yield device
    finally:
        of_world.bound_device_id = device


def mesh_groups() -> contextlib.AbstractContextManager[object]:
    """Return the context in which torch opens the groups of a mesh: all ranks call it, with equal numbers of calls.

    Before 2.14, torch names the groups that it splits after how many groups this rank is in. The ranks of a mesh may be
    in unequal numbers of them, and would then wait for one another under different names.
    """
    return contextlib.nullcontext() if _COUNTS_CALLS else unbound()


def leak_groups() -> None:
    """Keep torch's groups from being destroyed, now or when the interpreter ends.

    After a failure collectives may still be pending; destroying their group would wait for ranks that
    never join them, or abort the process.
    """
    for group in open_groups():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _opened.have_leaked = True


def abort_groups() -> None:
    """Abort the communicators of every group on a device: what waits for them there ends, without a result.

    Source: torch.distributed.distributed_c10d._abort_process_group, which also forgets the groups.
    """
    world = dist.distributed_c10d._world  # noqa: SLF001
    # Newest first, and NCCL's all at once: aborting one of them could otherwise wait for another.
    groups = sorted(world.pg_names, key=lambda group: world.pg_names[group], reverse=True)
    backends = [backend for group in groups for backend in _device_backends(group)]
    grouped = next((backend for backend in backends if hasattr(backend, "_group_start")), None)
    if grouped is not None:
        grouped._group_start()  # noqa: SLF001
    for backend in backends:
        backend.abort()
    if grouped is not None:
        grouped._group_end()  # noqa: SLF001


def _device_backends(group: dist.ProcessGroup) -> list[Any]:
    return [
        group._get_backend(device)  # noqa: SLF001
        for device in group._device_types  # noqa: SLF001
        if device.type != "cpu"
    ]


def have_groups_leaked() -> bool:
    """Return whether a world has failed in this process."""
    return _opened.have_leaked
