# SPDX-License-Identifier: Apache-2.0
"""Which device a rank computes on, and which backend carries its tensors."""

from __future__ import annotations

import torch

from rankwise.errors import ConfigurationError

BACKENDS = ("gloo", "nccl")


def choose_device(device: str | torch.device | None, backend: str | None, local_rank: int) -> str:
    """Return the device of a rank: the one asked for, the GPU of its local rank, or the CPU.

    Raises:
        ConfigurationError: there is no such GPU.
    """
    if device is not None:
        return str(torch.device(device))
    if backend == "gloo" or not torch.cuda.is_available():
        return "cpu"
    if local_rank >= torch.cuda.device_count():
        raise ConfigurationError(
            f"Local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}.",
            do="start at most one rank per GPU, or pass join(device='cpu')",
        )
    return f"cuda:{local_rank}"


def choose_backend(backend: str | None, device: str) -> str:
    """Return what carries tensors between ranks: the backend asked for, or what suits the device.

    Raises:
        ConfigurationError: there is no such backend, or it is not for this device.
    """
    if backend is None:
        return "nccl" if device.startswith("cuda") else "gloo"
    if backend not in BACKENDS:
        raise ConfigurationError(f"There is no backend {backend!r}.", do="use one of " + ", ".join(BACKENDS))
    if backend == "nccl" and not device.startswith("cuda"):
        raise ConfigurationError(
            f"The backend nccl needs a GPU, and this rank's device is {device}.",
            do="leave backend out, or pass join(backend='gloo')",
        )
    return backend


def torch_backends(device: str) -> str:
    """Return which backends torch opens its group with, for ranks on this kind of device."""
    # Control messages are CPU tensors on every machine; only GPU tensors go through NCCL.
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
