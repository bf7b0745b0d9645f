# SPDX-License-Identifier: Apache-2.0
"""Which device a rank computes on, and which backend sends its tensors.

Backends and their device types are read from torch's own tables, where packages for other devices register theirs.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rankwise.errors import ConfigurationError
from rankwise.world.device import accelerator
from rankwise.world.device.assignment import START_FEWER, Sight
from rankwise.world.device.kinds import is_accelerator, kind_named, type_of

if TYPE_CHECKING:
    from collections.abc import Sequence

HOST = "gloo"
"""The backend for CPU tensors, on every machine."""
_NO_BACKENDS = {"undefined", "fake"}
"""In torch's tables, but not for training."""


def choose_device(device: str | torch.device | None, backend: str | None, index: int) -> str:
    """Return the device of a rank: the requested one, the accelerator with its index, or the CPU.

    Args:
        device: the requested one.
        backend: the requested one.
        index: which of the devices that it sees is its own: see :func:`~rankwise.world.device.assignment.index_of`.

    Raises:
        ConfigurationError: there is no such device.
    """
    if device is not None:
        return str(torch.device(device))
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
    asked = None if device is None else torch.device(device)
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
