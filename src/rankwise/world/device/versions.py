# SPDX-License-Identifier: Apache-2.0
"""The versions of the accelerator toolkits of this torch, and its backends. Used by doctor and compat."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from rankwise.world.device import accelerator
from rankwise.world.device.kinds import KINDS

_TOOLKITS = ("cuda", "hip", "xpu")


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
    return nccl_version() is not None and accelerator.count_of("cuda") > 0
