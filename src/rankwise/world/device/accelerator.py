# SPDX-License-Identifier: Apache-2.0
"""The accelerator of this machine, as torch finds it: how many devices, their memory, random numbers and toolkits.

The first query may initialize the driver: the launcher makes none before it has forked its server.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rankwise.world.device.kinds import EXAMPLE, KINDS, DeviceKind, is_accelerator, kind_named

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

MIG_FILES = Path("/dev/nvidia-caps")
_TOOLKITS = ("cuda", "hip", "xpu")


def found_kind() -> DeviceKind | None:
    """Return the type of the accelerator here, or ``None`` if torch can use none.

    Source: torch.accelerator.current_accelerator.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else kind_named(device.type)


def shown_kind() -> DeviceKind:
    """Return the type that examples and errors show: that of the accelerator here, else NVIDIA's."""
    return found_kind() or EXAMPLE


def count() -> int:
    """Return how many devices of the accelerator this process sees; 0 if there is none."""
    return 0 if found_kind() is None else torch.accelerator.device_count()


def count_of(name: str) -> int:
    """Return how many devices of a type this process sees; 0 if torch does not know the type."""
    found = found_kind()
    return count() if found is not None and found.name == name else 0


def example(index: int = 0) -> str:
    """Return a device as an example shows it: ``cuda:0``."""
    return f"{shown_kind().name}:{index}"


def names() -> list[str]:
    """Return the names of the devices here, in order."""
    if not (num_devices := count()):
        return []
    kind = shown_kind()
    told = getattr(torch.get_device_module(kind.name), "get_device_name", None)
    return [kind.name if told is None else str(told(index)) for index in range(num_devices)]


def machine_names(mask: Sequence[str] | None) -> tuple[str, ...]:
    """Return a name for each device here that every process of the machine has for it.

    Args:
        mask: the entries of the variable that limits which devices a process sees; ``None`` if it is not set.
    """
    numbers = range(count())
    kind = shown_kind()
    # CUDA shows a process one instance of a GPU, the first of the mask, and may report the name of the whole GPU.
    if not is_mig(mask):
        properties = getattr(torch.get_device_module(kind.name), "get_device_properties", None)
        # A device that cannot be used raises its own error, with the rank's name, when it is used.
        with contextlib.suppress(AttributeError, RuntimeError):
            found = tuple(str(properties(index).uuid) for index in numbers) if properties is not None else ()
            if len(set(found)) == len(numbers) and all(name.strip("0-") for name in found):
                return found
    if mask is None or len(mask) < len(numbers):
        return tuple(map(str, numbers))
    return tuple(mask[: len(numbers)])


def mig_instances(mask: Sequence[str] | None) -> tuple[str, ...]:
    """Return the MIG instances of NVIDIA GPUs that ranks can use, one each, as entries of the mask; empty without MIG.

    A process sees one of them only: the first of its mask.

    Args:
        mask: the entries of ``CUDA_VISIBLE_DEVICES``; ``None`` if it is not set.
    """
    if mask is not None:
        return tuple(mask) if is_mig(mask) else ()
    # The first two files configure and monitor; each instance has further ones. Source: the user guide of MIG.
    files = {path.name for path in MIG_FILES.glob("nvidia-cap*")} - {"nvidia-cap1", "nvidia-cap2"}
    if not files:
        return ()
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=20).stdout  # noqa: S607 - as users call it
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(re.findall(r"UUID: (MIG-[^)\s]+)", listed))


def is_mig(mask: Sequence[str] | None) -> bool:
    """Return whether a mask names MIG instances of NVIDIA GPUs."""
    return mask is not None and any(entry.startswith("MIG-") for entry in mask)


def use(device: str) -> None:
    """Make a device the current one of this process. Does nothing for the CPU and for a type without an index."""
    if is_accelerator(device) and ":" in device:
        torch.accelerator.set_device_index(torch.device(device))


def synchronize(device: str | torch.device) -> None:
    """Wait until a device has done everything submitted to it."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(torch.device(device))


def free_bytes(index: int) -> int | None:
    """Return how much memory of a device is free for tensors; ``None`` if the device does not report it.

    Source: torch.accelerator.get_memory_info.
    """
    kind = shown_kind()
    if kind.is_shared:
        own = torch.get_device_module(kind.name)
        return int(own.recommended_max_memory() - own.driver_allocated_memory())
    try:
        free, _ = _of_memory("get_memory_info", "mem_get_info")(index)
        # Memory that torch caches and no tensor uses.
        return free + _of_memory("memory_reserved")(index) - _of_memory("memory_allocated")(index)
    except (AttributeError, RuntimeError):  # includes NotImplementedError
        return None


def random_state(device: str | torch.device) -> torch.Tensor:
    """Return the state of the random number generator of ``device``."""
    where = torch.device(device)
    if where.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(where)
    state = module.get_rng_state() if kind_named(where.type).is_shared else module.get_rng_state(where)
    return torch.as_tensor(state, device="cpu")  # not on the default device, which the script may have set


def set_random_state(device: str | torch.device, state: torch.Tensor) -> None:
    """Restore a state that :func:`random_state` returned."""
    where = torch.device(device)
    if where.type == "cpu":
        torch.set_rng_state(state)
        return
    module = torch.get_device_module(where)
    if kind_named(where.type).is_shared:
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, where)


@contextlib.contextmanager
def kept_random_states(device: torch.device) -> Generator[None]:
    """Restore the random states of the CPU and of ``device`` at the end of the block."""
    places = dict.fromkeys((torch.device("cpu"), device))
    states = [(place, random_state(place)) for place in places]
    try:
        yield
    finally:
        for place, state in states:
            set_random_state(place, state)


def autocast_state() -> tuple[bool, ...]:
    """Return whether autocast is on, for the CPU and for the accelerator here."""
    found = found_kind()
    kinds = ("cpu",) if found is None else ("cpu", found.name)
    return tuple(torch.is_autocast_enabled(kind) for kind in kinds)


def toolkits() -> dict[str, str]:
    """Return the versions of CUDA, ROCm's HIP or Intel's compiler that torch was built with."""
    found = {name: getattr(torch.version, name, None) for name in _TOOLKITS}
    return {name: str(version) for name, version in found.items() if version}


def nccl_version() -> tuple[int, ...] | None:
    """Return the version of NCCL, or of ROCm's RCCL; ``None`` if torch has neither."""
    if "cuda" not in toolkits() and "hip" not in toolkits():
        return None
    if not dist.is_nccl_available():
        return None
    from torch.cuda import nccl  # noqa: PLC0415 - only there with NCCL

    return tuple(int(part) for part in nccl.version()[:3])


def has_toolkit(name: str) -> bool:
    """Return whether torch was built with ``"cuda"``, ``"hip"`` or ``"xpu"``."""
    return name in toolkits()


def num_driver_files() -> int:
    """Return how many devices the drivers show, whether torch can use them or not."""
    patterns = [kind.driver_files for kind in KINDS.values() if kind.driver_files]
    found = [path for pattern in patterns for path in Path("/dev").glob(pattern)]
    return len([path for path in found if path.name.lstrip("abcdefghijklmnopqrstuvwxyz").isdecimal()])


def can_use_nccl() -> bool:
    """Return whether NCCL is available, with a device that it supports."""
    return nccl_version() is not None and count_of("cuda") > 0


def memory_reader(device: str) -> Callable[[], int] | None:
    """Return a function for the bytes that torch has allocated on a device, or ``None`` for the CPU.

    Source: torch.accelerator.memory_allocated.
    """
    return partial(_of_memory("memory_allocated"), torch.device(device)) if is_accelerator(device) else None


def _of_memory(name: str, own: str = "") -> Callable[..., Any]:
    """Return a function of torch.accelerator; before torch 2.11, which may lack some, the device's own of that name."""
    found = getattr(torch.accelerator, name, None)
    return found or getattr(torch.get_device_module(shown_kind().name), own or name)
