# SPDX-License-Identifier: Apache-2.0
"""Lesson 8 of the course: all_reduce, and a parameter server in two modes, as workers grow and one of them is slow.

python examples/lesson8_workers.py --plot workers.svg

A step of a worker is made to take 10 ms at least, and 30 ms on worker 0: the processes of this example share few cores.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from curve import draw
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw

STEPS = 40
SAMPLES_PER_WORKER = 8
STEP_SECONDS = 0.01
SLOW_STEP_SECONDS = 0.03
HOWS = ("all_reduce", "sync", "async")


def train(how: str, workers: int) -> tuple[float, float]:
    """Train on this rank; return the samples that all workers did per second, and the sum of the weights."""
    torch.manual_seed(0)
    batch = SAMPLES_PER_WORKER * workers
    data = TensorDataset(torch.randn(STEPS * batch, 16).double(), torch.randn(STEPS * batch, 1).double())
    with rw.join(device="cpu") as world:
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        server = None
        if how == "all_reduce":
            rw.replicate(model)
        else:
            server = rw.parameter_server(model, optimizer, servers=1, mode=how)
        started, num_samples = time.perf_counter(), 0
        for x, y in rw.DataLoader(data, global_batch_size=batch):
            nn.functional.mse_loss(model(x), y).backward()
            time.sleep(SLOW_STEP_SECONDS if world.rank == 0 else STEP_SECONDS)
            optimizer.step()
            optimizer.zero_grad()
            num_samples += len(x)
        pace = num_samples / (time.perf_counter() - started)
        if server is not None:
            server.synchronize()
        weights = sum(parameter.sum().item() for parameter in model.parameters())
        return rw.all_reduce(pace), weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-workers", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="picture of the samples per second over the workers, as .svg")
    options = parser.parse_args()

    curves: dict[str, list[tuple[float, float]]] = {how: [] for how in HOWS}
    for workers in range(1, options.most_workers + 1):
        weights = {}
        for how in HOWS:
            ranks = workers if how == "all_reduce" else workers + 1  # the last rank is the server
            pace, weights[how] = rw.launch(train, how, workers, ranks=ranks)[0]
            curves[how].append((workers, pace))
        paces = ", ".join(f"{how} {curves[how][-1][1]:.0f} samples/s" for how in HOWS)
        print(f"{workers} worker{'s:' if workers > 1 else ': '} {paces}")
        print(f"           weights {weights['all_reduce']:.6f} by all_reduce, {weights['sync']:.6f} by sync")
    if options.plot:
        draw(options.plot, curves, x_label="workers", y_label="samples per second", title="Pace as workers grow")


if __name__ == "__main__":
    main()
