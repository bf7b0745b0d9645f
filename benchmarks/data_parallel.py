# SPDX-License-Identifier: Apache-2.0
"""One training step on 2 GPUs: rankwise.replicate, with a process for each, against rankwise.data_parallel.

Both train the same net on the same global batch. Without two GPUs a row says that there is nothing to compare.
"""

from __future__ import annotations

import statistics
import time

import torch
from measure import Row, median_ratio, seconds, show
from torch import nn

import rankwise as rw
from rankwise.launch.function.launch import launch
from rankwise.parallel.data_parallel import data_parallel

NUM_DEVICES = 2
LOCAL_BATCH_SIZE = 64
NUM_STEPS = 20
REPETITIONS = 15
WARM_UPS = 3
REACH = 1.0


def net() -> nn.Module:
    """Return 12 linear layers of 2048 by 2048: 200 MB of parameters."""
    return nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(2048, 2048), nn.ReLU())])


def times_of(model: nn.Module, batch_size: int) -> list[float]:
    """Return seconds per step, one for each repetition."""
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(batch_size, 2048, device=device)
    found: list[float] = []
    for _ in range(WARM_UPS + REPETITIONS):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(NUM_STEPS):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize(device)
        found.append((time.perf_counter() - started) / NUM_STEPS)
    return found[WARM_UPS:]


def replicated() -> list[float]:
    """Return seconds per step of one rank."""
    with rw.join() as world:
        return times_of(rw.replicate(net().to(world.device)), LOCAL_BATCH_SIZE)


def main() -> None:
    num_devices = torch.cuda.device_count()
    what = f"training step, 12 wide layers, {NUM_DEVICES} GPUs, replicate against data_parallel"
    if num_devices < NUM_DEVICES:
        show([Row(f"{what}: needs {NUM_DEVICES} GPUs, {num_devices} here", "not measured", "not measured", 0.0, REACH)])
        return
    ours = launch(replicated, ranks=NUM_DEVICES)[0]
    devices = [f"cuda:{number}" for number in range(NUM_DEVICES)]
    peer = times_of(data_parallel(net().to(devices[0]), devices), LOCAL_BATCH_SIZE * NUM_DEVICES)
    ratio = median_ratio(ours, peer)
    show([Row(what, seconds(statistics.median(ours)), seconds(statistics.median(peer)), ratio, REACH)])


if __name__ == "__main__":
    main()
