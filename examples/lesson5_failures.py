# SPDX-License-Identifier: Apache-2.0
"""Lesson 5 of the course: a training that saves, loses a rank in its third epoch, and continues.

rankwise run -n 2 --max-restarts 1 examples/lesson5_failures.py --fail
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from curve import draw
from lesson1_one_device import load
from torch import nn

import rankwise as rw

FAILS_IN_EPOCH = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/lesson5"))
    parser.add_argument("--plot", type=Path, help="picture of the loss over the epochs of this run, as .svg")
    parser.add_argument("--fail", action="store_true", help="raise an error on the last rank, in epoch 3")
    options = parser.parse_args()

    torch.manual_seed(0)
    with rw.join() as world:
        train_set, _ = load()
        net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
        model = rw.replicate(net.to(world.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        curve = []
        loader = rw.DataLoader(train_set, global_batch_size=64, shuffle=True)
        checkpoints = rw.Checkpointer(options.checkpoints, keep=2)
        checkpoints.restore(model=model, optimizer=optimizer, loader=loader)  # nothing there: starts from scratch
        first_try = os.environ.get("RANKWISE_ATTEMPT", "0") == "0"
        for epoch in range(loader.epoch, options.epochs):
            losses, sizes = [], []
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                sizes.append(len(x))
            if options.fail and first_try and epoch + 1 == FAILS_IN_EPOCH and world.rank == world.world_size - 1:
                raise RuntimeError("a failure on purpose")
            mean = rw.mean(losses, sizes)
            curve.append((epoch + 1, mean))
            rw.print(f"epoch {epoch + 1}: loss {mean:.4f} on {world.world_size} rank(s)")
            checkpoints.save(model=model, optimizer=optimizer, loader=loader)
        if options.plot and world.rank == 0:
            draw(options.plot, {"loss": curve}, x_label="epoch", y_label="mean loss", title="Loss of this run")


if __name__ == "__main__":
    main()
