# SPDX-License-Identifier: Apache-2.0
"""The device of each part of a model: sizes in, a mapping out; and the report of it.

The plan is computed from sizes and budgets alone; only the budgets read devices, memory and disk. Imported by place.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rankwise.comm.session import current_or_none
from rankwise.errors import ConfigurationError, bytes_text
from rankwise.replicate.blocks import near
from rankwise.world.device import accelerator
from rankwise.world.device.kinds import is_accelerator

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

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


POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
OFFLOADED = ("cpu", "disk")
"""Where weights are kept until they are fetched; ``cpu`` only if another device executes."""

_UNITS = {"": 1, "B": 1, **{f"{word}{end}": base**power
    for power, word in enumerate("KMGT", 1) for end, base in (("B", 1000), ("iB", 1024))}}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartSize:
    """One part of a model that goes to one device as a whole."""

    name: str
    num_bytes: int
    """Its size at home, without tensors of earlier parts."""
    fetch_bytes: int
    """Its size on another device, while it runs there."""
    tied_to: str | None = None
    """An earlier part that shares a parameter with it."""


@dataclass(frozen=True, slots=True)
class PartDevice:
    """The device of a part, and why."""

    device: str
    why: str


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The device of every part, and the device that runs offloaded parts."""

    choices: Mapping[str, PartDevice]
    executes: str
    has_room_ahead: bool = True
    """Whether the next part may be fetched while one runs."""

    def runs_on(self, name: str) -> str:
        """Return the device that runs a part."""
        device = self.choices[name].device
        return self.executes if device in OFFLOADED else device


def parse_bytes(text: str | int) -> int:
    """Return a number of bytes: ``4096``, ``"1.5GB"`` (10⁹) or ``"10GiB"`` (2³⁰).

    Raises:
        ConfigurationError: it is neither, or negative.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
    unit = match and {name.lower(): factor for name, factor in _UNITS.items()}.get(match[2].lower())
    if not match or unit is None:
        raise ConfigurationError(
            f"{text!r} is not an amount of memory.", do='pass a number of bytes, or "500MB", "10GiB"'
        )
    return int(float(match[1]) * unit)


def by_policy(policy: str, sizes: Sequence[PartSize], budgets: Mapping[str, int]) -> PlacementPlan:
    """Choose a device for every part, in their order, none over its budget.

    The accelerators come first: ``sequential`` fills one after the other; ``balanced`` and ``auto`` give them equal
    shares; ``balanced_low_0`` leaves the first as empty as possible. Other parts go to the CPU, and then
    to disk; the device that executes them keeps room for two parts as large as the largest of them, or for one if
    two do not fit. Parts with a common parameter stay together.

    Args:
        policy: one of :data:`POLICIES`.
        sizes: all parts, in the order in which they run.
        budgets: bytes per device, the accelerators first.

    Raises:
        ConfigurationError: the policy is unknown, there is no device, or a part or the model is too large.
    """
    if policy not in POLICIES:
        raise ConfigurationError(
            f"Unknown policy {policy!r}.",
            evidence=near(policy, POLICIES),
            do=f"pass plan= one of {', '.join(POLICIES)}, or a mapping from module names to devices",
        )
    if not any(budgets.values()):
        raise ConfigurationError(
            f"The policy {policy!r} found no device with free memory.",
            evidence=_lines(budgets) or "budgets is empty",
            do=f'budgets={{"{accelerator.example()}": "10GiB", "cpu": "30GiB"}}, or omit budgets',
        )
    groups = _groups(sizes)
    executes = executing(budgets)
    kept_free, ahead = 0, True
    while True:
        left = dict(budgets)
        if executes in left:
            left[executes] -= kept_free
        choices = _filled(policy, groups, left, budgets, kept_free if executes in budgets else 0)
        elsewhere = {*OFFLOADED} - {executes}
        fetched = [size for size in sizes if choices[size.name].device in elsewhere]
        largest = max(fetched, key=lambda size: size.fetch_bytes, default=None)
        if largest is None or executes not in budgets:
            break
        ahead = 2 * largest.fetch_bytes <= budgets[executes]
        needed = largest.fetch_bytes * (2 if ahead else 1)
        if needed > budgets[executes]:
            raise _too_large(largest.name, largest.fetch_bytes, budgets, f"It has to run on {executes}.")
        if needed <= kept_free:
            break
        kept_free = needed
    return PlacementPlan(choices, executes, has_room_ahead=ahead)


def by_hand(
    mapping: Mapping[str, str], names: Mapping[str, Sequence[Sequence[str]]], whole: Mapping[str, str]
) -> dict[str, PartDevice]:
    """Return the device of every part by the longest fitting prefix; ``""`` stands for everything else.

    Args:
        mapping: from names of modules or parameters to devices.
        names: for each part, all names of each of its parameters and buffers: a module that is registered twice has
            two, and either may be in ``mapping``.
        whole: why each part is not split.

    Raises:
        ConfigurationError: a parameter is not covered or gets two devices, or a part would be split.
    """
    device_of: dict[str, PartDevice] = {}
    uncovered: list[str] = []
    for part, inside in names.items():
        keys = {tensor_names[0]: _key(mapping, tensor_names) for tensor_names in inside}
        uncovered += [name for name, key in keys.items() if key is None]
        found = {mapping[key]: key for key in keys.values() if key is not None}
        if len(found) > 1:
            raise ConfigurationError(
                f"The plan splits {part or 'the model'}, which must remain whole: {whole[part]}.",
                evidence="\n".join(f"{key!r}: {device!r}" for device, key in found.items()),
                do=f"assign it to one device: {{{part!r}: {next(iter(found))!r}}}, and omit the names inside it",
            )
        device, key = next(iter(found.items()), ("cpu", ""))
        device_of[part] = PartDevice(device, f"plan[{key!r}]")
    if uncovered:
        raise ConfigurationError(
            f"The plan does not cover {len(uncovered)} parameters and buffers.",
            evidence=", ".join(uncovered[:8]) + (", ..." if len(uncovered) > 8 else ""),  # noqa: PLR2004 - enough to see what is meant
            do='add "": device for everything else',
        )
    return device_of


def executing(devices: Iterable[str]) -> str:
    """Return the device that runs parts kept in memory or on disk: the first accelerator, or the CPU."""
    return next((device for device in devices if device not in {*OFFLOADED, "meta"}), "cpu")


def _key(mapping: Mapping[str, str], names: Sequence[str]) -> str | None:
    """Return the key of a mapping that applies to a tensor with these names."""
    found = [max(fitting, key=len) for name in names if (fitting := [key for key in mapping if _is_in(name, key)])]
    named = [key for key in found if key] or found
    if len({mapping[key] for key in named}) > 1:
        raise ConfigurationError(
            f"The plan gives {names[0]} {len(set(named))} devices, by {len(names)} names of its module.",
            evidence="\n".join(f"{key!r}: {mapping[key]!r}" for key in dict.fromkeys(named)),
            do="use one of the names: a module has one device",
        )
    return next(iter(named), None)


def _is_in(name: str, key: str) -> bool:
    return key in {"", name} or name.startswith(f"{key}.")


def _groups(sizes: Sequence[PartSize]) -> list[list[PartSize]]:
    """Group parts that share parameters, at the position of the first."""
    group_of: dict[str, list[PartSize]] = {}
    groups: list[list[PartSize]] = []
    for size in sizes:
        if size.tied_to is not None:
            group_of[size.name] = group_of[size.tied_to]
            group_of[size.name].append(size)
        else:
            group_of[size.name] = [size]
            groups.append(group_of[size.name])
    return groups


def _filled(
    policy: str,
    groups: list[list[PartSize]],
    left: dict[str, int],
    budgets: Mapping[str, int],
    kept_free: int,
) -> dict[str, PartDevice]:
    totals = [sum(size.num_bytes for size in group) for group in groups]
    accelerators = [device for device in budgets if device not in OFFLOADED]
    limits = _limits(policy, totals, [max(left[device], 0) for device in accelerators])
    used = dict.fromkeys(budgets, 0)
    choices: dict[str, PartDevice] = {}
    current = 0
    for group, total in zip(groups, totals, strict=True):
        fits = [n for n in range(current, len(accelerators)) if used[accelerators[n]] + total <= limits[n]]
        if fits:
            current = fits[0]
            device, why = accelerators[current], f"{policy}: its share is {bytes_text(limits[current])}"
        else:
            device = next((one for one in OFFLOADED if used.get(one, 0) + total <= left.get(one, -1)), "")
            why = "the first with room" if device == next(iter(budgets)) else "no room before it"
        if not device:
            if total > max(budgets.values()):
                raise _too_large(group[0].name, total, budgets, "It is not split.")
            raise _no_room(sum(totals), budgets, kept_free)
        used[device] += total
        for size in group:
            choices[size.name] = PartDevice(device, why if size is group[0] else f"shares weights with {group[0].name}")
    return choices


def _limits(policy: str, totals: Sequence[int], room: list[int]) -> list[int]:
    """Return the bytes that each accelerator may take, filled one after the other."""
    if len(room) < 2 or policy == "sequential" or not _holds(totals, room):  # noqa: PLR2004 - one has nothing to balance
        return room
    if policy == "balanced_low_0":
        first = next(n for n in range(len(totals) + 1) if _holds(totals[n:], room[1:]))
        return [sum(totals[:first]), *_limits("balanced", totals[first:], room[1:])]
    low, high = max(totals, default=0), sum(totals)
    while low < high:
        middle = (low + high) // 2
        if _holds(totals, [min(limit, middle) for limit in room]):
            high = middle
        else:
            low = middle + 1
    return [min(limit, high) for limit in room]


def _holds(totals: Sequence[int], limits: Sequence[int]) -> bool:
    """Return whether devices of these limits, filled one after the other, take everything."""
    device, used = 0, 0
    for total in totals:
        while device < len(limits) and used + total > limits[device]:
            device, used = device + 1, 0
        if device == len(limits):
            return False
        used += total
    return True


def _lines(budgets: Mapping[str, int]) -> str:
    return "\n".join(f"{device}: {bytes_text(amount)}" for device, amount in budgets.items())


def _too_large(name: str, num_bytes: int, budgets: Mapping[str, int], why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name or 'The model'} takes {bytes_text(num_bytes)}, more than any budget allows. {why}",
        evidence=_lines(budgets),
        do="increase the budget of a device, or divide the model into smaller blocks",
    )


def _no_room(total: int, budgets: Mapping[str, int], kept_free: int) -> ConfigurationError:
    missing = [device for device in OFFLOADED if device not in budgets]
    words = {"cpu": 'add "cpu" to budgets', "disk": "pass offload_folder=, so that the rest is stored on disk"}
    return ConfigurationError(
        f"The model takes {bytes_text(total)}, more than the memory of all devices.",
        evidence=_lines(budgets) + (f"\nkept free for fetching: {bytes_text(kept_free)}" if kept_free else ""),
        do=", or ".join(words[device] for device in missing) or "increase the budget of a device",
    )


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """The place of one part of a model."""

    module: str
    """The block's name, or that of a parameter of an open module."""
    device: str
    num_bytes: int
    """Parameters and buffers, tied ones counted once."""
    dtypes: tuple[str, ...]
    """Dtypes of its parameters and buffers, the one of the most bytes first; ``int8`` with ``place(int8=True)``, where
    ``weight.dtype`` is the dtype that the layer computes in."""
    runs_on: str
    """The device that executes it; weights on another device are fetched to it."""
    why: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of all parts of a model. Printed, it is a table."""

    parts: tuple[PlacedPart, ...]
    is_ahead: bool
    """Whether the next part is fetched while one runs."""

    @property
    def bytes_on(self) -> dict[str, int]:
        """Bytes per device, in the order of the table."""
        total: dict[str, int] = {}
        for part in self.parts:
            total[part.device] = total.get(part.device, 0) + part.num_bytes
        return total

    def __str__(self) -> str:
        head = ("module", "device", "bytes", "numbers", "runs on", "why")
        rows = [
            (
                part.module or "(the model)",
                part.device,
                bytes_text(part.num_bytes),
                ", ".join(part.dtypes),
                part.runs_on,
                part.why,
            )
            for part in self.parts
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows)]
        lines = ["  ".join(row).rstrip() for row in padded]
        lines += ["total  " + ", ".join(f"{device}: {bytes_text(size)}" for device, size in self.bytes_on.items())]
        if any(part.device != part.runs_on for part in self.parts):
            lines.append("fetched to where it runs: one part at a time" + (", and the next" if self.is_ahead else ""))
        return "\n".join(lines)
