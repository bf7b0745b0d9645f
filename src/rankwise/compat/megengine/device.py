# SPDX-License-Identifier: Apache-2.0
"""``megengine.device``: the number of devices. Imported by users and by ``distributed``."""

from __future__ import annotations

from rankwise.errors import ConfigurationError
from rankwise.world.device import accelerator

GPU_TYPES = ("cuda", "gpu", "rocm")
DEVICE_TYPES = ("xpu", "cpu", *GPU_TYPES)


def get_device_count(device_type: str) -> int:
    """Return the number of devices of a kind.

    Args:
        device_type: ``"gpu"``, ``"cuda"`` or ``"rocm"``: of GPUs; ``"cpu"``: 1; ``"xpu"``: of GPUs, or 1 without a
            GPU.

    Raises:
        ConfigurationError: the kind is unknown.
    """
    check_device_type(device_type)
    num_gpus = accelerator.count()
    if device_type == "cpu":
        return 1
    return max(num_gpus, 1) if device_type == "xpu" else num_gpus


get_device_count_by_fork = get_device_count
"""Counting opens no device here, so no separate process is needed. Scripts use it as ``dist.helper``'s."""


def check_device_type(device_type: str) -> None:
    """Raise if the kind of device is unknown."""
    if device_type not in DEVICE_TYPES:
        raise ConfigurationError(
            f"Unknown device_type={device_type!r}.",
            do="use one of " + ", ".join(DEVICE_TYPES) + "; xpu selects GPUs if there are any, else the CPU",
        )
