# SPDX-License-Identifier: Apache-2.0
"""Which device a rank computes on, from what every rank of its host sees, and which backend sends its tensors.

Backends and their device types are read from torch's own tables, where packages for other devices register theirs.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rankwise.errors import ConfigurationError, fold_ranks, fold_values
from rankwise.world.device import accelerator
from rankwise.world.device.kinds import is_accelerator, kind_named, type_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HOST = "gloo"
"""The backend for CPU tensors, on every machine."""
_NO_BACKENDS = {"undefined", "fake"}
"""In torch's tables, but not for training."""


def choose_device(device: str | torch.device | None, backend: str | None, index: int) -> str:
    """Return the device of a rank: the requested one, the accelerator with its index, or the CPU.

    Args:
        device: the requested one.
        backend: the requested one.
        index: which of the devices that it sees is its own: see :func:`index_of`.

    Raises:
        ConfigurationError: there is no such device.
    """
    if device is not None:
        return str(device_named(device))
    kind = accelerator.found_kind()
    if backend == HOST or kind is None:
        return "cpu"
    if kind.is_shared:
        return f"{kind.name}:0"
    if index >= accelerator.count():
        raise ConfigurationError(
            f"Local rank {index} has no {kind.title}: this machine has {accelerator.count()}.",
            do=START_FEWER.format(title=kind.title),
        )
    return f"{kind.name}:{index}"


def device_named(device: str | torch.device) -> torch.device:
    """Return the device that a script names.

    Raises:
        ConfigurationError: torch knows no such device.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"torch knows no device {device!r}.",
            evidence=str(error).splitlines()[0],
            do='pass "cpu", "cuda" or "cuda:0", or leave device= out',
        ) from None


def look_at_devices(
    device: str | torch.device | None, backend: str | None, local_rank: int | None, mask: Sequence[str] | None
) -> Sight:
    """Return what this rank sees, for the other ranks of its host.

    Args:
        device: the requested one.
        backend: the requested one.
        local_rank: the number that its launcher sets, if any.
        mask: the entries of the variable that limits which devices it sees; ``None`` if it is not set.
    """
    kind = accelerator.found_kind()
    asked = None if device is None else device_named(device)
    uses_it = backend != HOST if asked is None else kind is not None and asked.type == kind.name
    if kind is None or kind.is_shared or not uses_it:
        return Sight(local_rank=local_rank)
    requested = None
    if asked is not None:
        requested = asked.index if _has_index(asked) else torch.accelerator.current_device_index()
    devices = accelerator.machine_names(mask)
    return Sight(kind=kind.name, devices=devices, local_rank=local_rank, requested=requested)


def bound_device(device: str, backend: str) -> torch.device | None:
    """Return the device that torch binds a process group to: one with an index, whose tensors the backend carries.

    Without it, NCCL chooses a device itself: by ``LOCAL_RANK``, else by the rank modulo the number of devices, neither
    of which is this rank's device where a launcher shows each rank its own. Source: torch 2.15's ``nccl``.
    """
    own = torch.device(device)
    is_own_backend = backend != HOST and is_accelerator(device) and _carries(backend, own.type)
    return own if is_own_backend and _has_index(own) else None


def _has_index(device: torch.device) -> bool:
    return ":" in str(device)


def choose_backend(backend: str | None, device: str) -> str:
    """Return the backend that sends tensors between ranks: the requested one, or the one for the device.

    Raises:
        ConfigurationError: there is no such backend, or it does not support this device.
    """
    kind = type_of(device)
    if backend is None:
        return _default_backend(kind)
    _register_backend_of(kind)
    known = known_backends()
    if backend not in dist.Backend.backend_list or backend in _NO_BACKENDS:
        raise ConfigurationError(f"Unknown backend {backend!r}.", do="use one of " + ", ".join(known))
    if backend != HOST and not _carries(backend, kind):
        for_kinds = [kind_named(name) for name in dist.Backend.backend_capability.get(backend, [])]
        wanted = " or ".join(dict.fromkeys(f"a {one.title}" for one in for_kinds)) or "another device"
        raise ConfigurationError(
            f"The backend {backend} needs {wanted}, but this rank's device is {device}.",
            do="leave backend out, or pass join(backend='gloo')",
        )
    if backend not in known:
        raise ConfigurationError(
            f"This torch was built without the backend {backend}.", do="use one of " + ", ".join(known)
        )
    return backend


def known_backends() -> list[str]:
    """Return the backends that this torch can open."""
    return [name for name in dist.Backend.backend_list if name not in _NO_BACKENDS and dist.is_backend_available(name)]


def goes_through_host(device: str, backend: str) -> bool:
    """Return whether tensors of a device are copied to the CPU to be sent: the backend does not support them."""
    return is_accelerator(device) and not _carries(backend, type_of(device))


def waits_on_device(device: str, backend: str) -> bool:
    """Return whether collectives of a device's tensors order a stream instead of having the CPU wait."""
    return backend not in {HOST, "none"} and is_accelerator(device)


def torch_backends(device: str, backend: str) -> str:
    """Return the backend argument for torch's process group, for ranks on this kind of device."""
    kind = type_of(device)
    if backend == HOST:
        return HOST
    # Control messages are CPU tensors on every machine; only tensors of the device use its own backend.
    return f"cpu:{backend}" if kind == "cpu" else f"cpu:{HOST},{kind}:{backend}"


def backend_of(kind: str) -> str:
    """Return the backend for a kind of device in torch's table, whether this torch has it or not; else Gloo."""
    _register_backend_of(kind)
    chosen = dist.Backend.default_device_backend_map.get(kind, HOST)
    return HOST if chosen in _NO_BACKENDS else chosen


def _default_backend(kind: str) -> str:
    chosen = backend_of(kind)
    if not dist.is_backend_available(chosen):
        raise ConfigurationError(
            f"This torch was built without {chosen}, the backend for {kind}.",
            do=f"install a build of torch with {chosen}, or pass join(backend='gloo', device='{kind}'): tensors then "
            "go through host memory",
        )
    return chosen


def _register_backend_of(kind: str) -> None:
    """Import the package that registers the backend of a kind of device, if there is one."""
    package = kind_named(kind).package
    if package and kind not in dist.Backend.default_device_backend_map:
        with suppress(ImportError):
            importlib.import_module(package)


def _carries(backend: str, kind: str) -> bool:
    return kind in dist.Backend.backend_capability.get(backend, [])


# -- which of the devices that a rank sees is its own -------------------------------------------------

# A launcher may show every rank all devices (torchrun), each its own (srun --gpus-per-task=1, masks) or some. The
# numbers of devices start at 0 in every process, so only names that hold for the whole machine can be compared.


START_FEWER = "start at most one rank per {title}, or pass join(device='cpu')"
"""The fix where there are more ranks than devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What one rank sees of the devices of its host; none if it computes on the CPU."""

    kind: str = ""
    """Torch's name for their type."""
    devices: Sequence[str] = ()
    """A name for each that is the same in every process of the machine, in the order of their numbers here."""
    local_rank: int | None = None
    """Its local rank, if its launcher sets one."""
    requested: int | None = None
    """The number of the device that its script requests; ``None`` leaves the choice to rankwise."""


def index_of(rank: int, on_host: Mapping[int, Sight]) -> int:
    """Return the number of the device of a rank among those that it sees. It may see fewer.

    Ranks that see the same devices share them in the order of their local ranks. A rank that sees devices which no
    other rank sees uses the first: its launcher has selected them for it.

    Args:
        rank: its number in the world.
        on_host: what the ranks of its host see, by rank; it is one of them.
    """
    own = on_host[rank]
    if own.requested is not None:
        return own.requested
    order = sorted((sight.local_rank or 0, other) for other, sight in on_host.items() if sight.devices == own.devices)
    return [other for _, other in order].index(rank)


def refuse_unequipped(hostname: str, on_host: Mapping[int, Sight], *, may_share: bool) -> None:
    """Raise if a rank of a host has no device, or the one of another rank.

    Args:
        hostname: the host, for the error.
        on_host: as in :func:`index_of`.
        may_share: whether scripts may request the same device for several ranks.

    Raises:
        ConfigurationError: names the ranks.
    """
    users: dict[str, list[int]] = defaultdict(list)
    for rank, sight in on_host.items():
        index = index_of(rank, on_host)
        if index < len(sight.devices):
            users[sight.devices[index]].append(rank)
        elif sight.devices and sight.requested is None:
            sharing = [other for other in on_host.values() if other.devices == sight.devices]
            title, count = kind_named(sight.kind).title, len(sight.devices)
            raise ConfigurationError(
                f"Rank {rank} has no {title}: {len(sharing)} ranks on {hostname} share {count} {title}"
                f"{'s' * (count > 1)}.",
                do=START_FEWER.format(title=title),
            )
    for name, ranks in users.items():
        if len(ranks) > 1 and not may_share:
            title = kind_named(on_host[ranks[0]].kind).title
            raise ConfigurationError(
                f"{fold_ranks(ranks).capitalize()} on {hostname} would use the same {title}: {name}.",
                evidence=fold_values({rank: f"sees {', '.join(on_host[rank].devices)}" for rank in ranks}),
                do=f"give each rank a {title} of its own (srun --gpus-per-task=1), or pass join(backend='gloo')",
            )
