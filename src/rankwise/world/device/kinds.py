# SPDX-License-Identifier: Apache-2.0
"""The types of device that rankwise has facts about, and torch's messages for a missing device.

Pure: imports no torch. A type that is not in the table works too, with the defaults of :class:`DeviceKind`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceKind:
    """What torch cannot be asked about a type of device."""

    name: str
    """Torch's name for it."""
    title: str = "device"
    """The name for people."""
    visible: str = ""
    """The variable that limits which ones a process sees; empty if there is none."""
    package: str = ""
    """The module that registers its backend with torch when imported."""
    driver_files: str = ""
    """One file per device, as a pattern below /dev."""
    examine: str = "python -m torch.utils.collect_env"
    """A command that shows the devices."""
    is_shared: bool = False
    """Whether all ranks of a machine use the same one."""
    pins: bool = True
    """Whether copies to it are faster from pinned memory."""
    has_streams: bool = True
    has_float64: bool = True
    has_triton: bool = False
    """Whether Triton compiles kernels for it."""


KINDS = {
    kind.name: kind
    for kind in (
        DeviceKind(
            name="cuda",
            title="GPU",
            visible="CUDA_VISIBLE_DEVICES",
            driver_files="nvidia[0-9]*",
            examine="nvidia-smi; python -m torch.utils.collect_env",
            has_triton=True,
        ),
        DeviceKind(name="xpu", title="GPU", visible="ZE_AFFINITY_MASK", has_triton=True),
        DeviceKind(name="mps", title="GPU", is_shared=True, pins=False, has_streams=False, has_float64=False),
        DeviceKind(
            name="npu", title="NPU", visible="ASCEND_RT_VISIBLE_DEVICES", package="torch_npu", has_float64=False
        ),
        DeviceKind(
            name="hpu",
            title="HPU",
            visible="HABANA_VISIBLE_MODULES",
            package="habana_frameworks.torch.distributed.hccl",
            has_streams=False,
            has_float64=False,
        ),
    )
}
EXAMPLE = KINDS["cuda"]
"""The type that examples show if there is no accelerator."""
PASSED_ON = tuple(kind.visible for kind in KINDS.values() if kind.visible)
"""Variables that a launcher passes to other machines."""
HIDES_GPUS = {EXAMPLE.visible: ""}
"""Variables that hide the GPUs from scripts. ROCm reads this one too; the others have none."""
SHARES_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The variable by which NCCL accepts several ranks per GPU, also on its MIG instances. Source: NCCL 2.30."""
LOADS_PROFILER = "CUDA_INJECTION64_PATH"
"""The variable by which a profiler is loaded into every process that uses a GPU."""

MISSING_GPU = (
    # A torch without CUDA, by two calls; then one with CUDA, without a driver or a device.
    "has no attribute '_cuda_setDevice'",
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver on your system",
    "No CUDA GPUs are available",
)
"""Torch's messages if a script asks for a GPU and there is none."""
ASK_FIRST = "call torch.cuda only where torch.cuda.is_available()"


def kind_named(name: str) -> DeviceKind:
    """Return what is known about a type of device."""
    return KINDS.get(name) or DeviceKind(name=name)


def type_of(device: str) -> str:
    """Return ``"cuda"`` for ``"cuda:1"``."""
    return device.partition(":")[0]


def is_accelerator(device: str) -> bool:
    """Return whether a device is anything but the CPU."""
    return type_of(device) not in {"cpu", "meta"}


def variables_for_instance(instance: str) -> dict[str, str]:
    """Return the variables of a rank that uses one MIG instance of an NVIDIA GPU.

    They are set in the rank's process, before it first uses CUDA: the driver reads the mask when it is initialized.
    """
    return {EXAMPLE.visible: instance, SHARES_GPUS: "1"}
