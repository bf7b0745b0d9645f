# SPDX-License-Identifier: Apache-2.0
"""What one of 4 ranks needs to train with Adam, sharded, against what one device needs for the whole model.

The figure is how far the process's memory rises above what it was before there was a model (the peak of its resident
set, which the kernel keeps), so that gathered blocks and buffers count as well as parameters, gradients and optimizer
state. The batch is one sample: activations hardly count.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from measure import Row, show
from torch import nn
from torch.distributed.tensor import DTensor

import rankwise as rw
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from rankwise.world.facts import World

NUM_RANKS = 4
NUM_BLOCKS = 32
WIDTH = 1024
NUM_STEPS = 3
REACH = 0.30
MMAP_THRESHOLD = -3
"""The option of the C library's mallopt (malloc.h) from which size on memory is given back at once."""


def build() -> nn.Module:
    """Return 32 blocks of 4 MB on the meta device."""
    with torch.device("meta"):
        return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(NUM_BLOCKS)])


def fill(model: nn.Module) -> None:
    """Give the parameters values, as a checkpoint would."""
    with torch.no_grad():
        for parameter in model.parameters():
            part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            part.normal_(std=0.02)


def resident_bytes(field: str) -> int:
    """Return a line of the kernel's account of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(field)


def rise(world: World) -> int:
    """Return by how many bytes training raised this process's memory at most; alone, without sharding."""
    sharded = world.world_size > 1
    # On both sides alike: else the C library keeps what gathered blocks leave, and its holes are measured.
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 64 * 1024)
    warm_up = nn.Linear(8, 8)
    warm_up = rw.shard(warm_up) if sharded else warm_up
    optimizer = torch.optim.Adam(warm_up.parameters(), foreach=False)
    warm_up(torch.zeros(1, 8)).sum().backward()
    optimizer.step()
    # The kernel restarts counting the peak.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident_bytes("VmRSS")
    model = build()
    model = rw.shard(model) if sharded else model.to_empty(device="cpu")
    fill(model)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.ones(1, WIDTH)
    for _step in range(NUM_STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return resident_bytes("VmHWM") - before


def measure() -> Row:
    """Return the row: the rank that needs most, against one device."""
    ours = max(result.get() for result in run_ranks(rise, NUM_RANKS, timeout_seconds=600))
    whole = run_ranks(rise, 1, timeout_seconds=600)[0].get()
    return Row(
        f"memory to train with Adam, one of {NUM_RANKS} ranks, against the whole model",
        f"{ours / 2**20:.0f} MiB",
        f"{whole / 2**20:.0f} MiB",
        ours / whole,
        REACH,
    )


if __name__ == "__main__":
    show([measure()])
