# SPDX-License-Identifier: Apache-2.0
"""The devices of this process, and the free memory of each. Reads only. Imported by place."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rankwise.comm.session import current_or_none
from rankwise.errors import ConfigurationError
from rankwise.world.device import accelerator
from rankwise.world.device.kinds import is_accelerator

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

MARGIN = 0.1
"""Share of the free memory left for everything that is not counted."""


def device_name(device: object) -> str:
    """Return the name in a plan (``"cuda:0"``, ``"cpu"``, ``"disk"``) of a name, GPU number or ``torch.device``.

    Raises:
        ConfigurationError: there is no such device.
    """
    if device == "disk":
        return "disk"
    try:
        found = torch.device(accelerator.example(device) if isinstance(device, int) else device)  # type: ignore[arg-type]
    except (RuntimeError, TypeError) as error:
        raise _no_device(device) from error
    if found.type in {"cpu", "meta"}:
        return found.type
    index = found.index or 0
    if index >= accelerator.count_of(found.type):
        raise _no_device(device)
    return f"{found.type}:{index}"


def default_budgets(already_bytes: Mapping[str, int], offload_folder: str | os.PathLike[str] | None) -> dict[str, int]:
    """Return the free bytes on each device of this process, less a margin: GPUs, then the CPU, then disk.

    In a joined world the GPUs and the memory of a machine are divided among its ranks. ``already_bytes`` is the current
    size of the model itself on each device.
    """
    budgets: dict[str, int] = {}
    for index in _own_gpus():
        free_here, name = accelerator.free_bytes(index), accelerator.example(index)
        if free_here is not None:
            budgets[name] = int(free_here * (1 - MARGIN)) + already_bytes.get(name, 0)
    session = current_or_none()
    free = int(_free_memory_bytes() * (1 - MARGIN)) // (1 if session is None else session.world.local_world_size)
    budgets["cpu"] = free + already_bytes.get("cpu", 0)
    if offload_folder is not None:
        budgets["disk"] = free_disk_bytes(offload_folder)
    return budgets


def free_disk_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    place = Path(folder).absolute()
    there = next(one for one in (place, *place.parents) if one.exists())
    return shutil.disk_usage(there).free


def _own_gpus() -> list[int]:
    count = accelerator.count()
    session = current_or_none()
    if session is None or not count:
        return list(range(count))
    world = session.world
    if world.local_world_size > count:
        return [torch.device(world.device).index or 0] if is_accelerator(world.device) else []
    begin, end = (count * rank // world.local_world_size for rank in (world.local_rank, world.local_rank + 1))
    return list(range(begin, end))


def _free_memory_bytes() -> int:
    """Return the memory available to this process, within the limit of its control group.

    Source: proc_meminfo(5) ``MemAvailable``; cgroup-v2.rst ``memory.max``, ``memory.current``.
    """
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()[-1].rpartition(":")[2]
        for folder in (Path("/sys/fs/cgroup", group.lstrip("/")), Path("/sys/fs/cgroup")):
            with contextlib.suppress(OSError, ValueError):
                limit = int((folder / "memory.max").read_text(encoding="ascii"))
                free = min(free, max(limit - int((folder / "memory.current").read_text(encoding="ascii")), 0))
    return free


def _no_device(device: object) -> ConfigurationError:
    count = accelerator.count()
    first, last = accelerator.example(), accelerator.example(count - 1)
    gpus = f"{first} to {last}" if count > 1 else first if count else "no GPU"
    return ConfigurationError(
        f"Unknown device {device!r}.",
        evidence=f"this process has {gpus}, cpu, disk",
        do=f'name one of these: {{"layers.0": "{accelerator.example()}", "": "cpu"}}',
    )
