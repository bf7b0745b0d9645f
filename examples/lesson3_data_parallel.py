# SPDX-License-Identifier: Apache-2.0
"""Lesson 3 of the course: who gets which samples, one all_reduce, and training with and without reshuffling.

rankwise run -n 2 examples/lesson3_data_parallel.py --plot shuffling.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from curve import draw
from lesson1_one_device import load
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw

NUM_SHOWN = 8


def show_sampler() -> None:
    """Print which of 8 samples each rank gets, in two epochs."""
    loader = rw.DataLoader(torch.arange(NUM_SHOWN), global_batch_size=4, shuffle=True)
    for epoch in range(2):
        for number, samples in enumerate(loader):
            shares = rw.all_gather_object(samples.tolist())
            by_rank = ", ".join(f"rank {rank} {share}" for rank, share in enumerate(shares))
            rw.print(f"epoch {epoch} batch {number}: {by_rank}")


def show_all_reduce(world: rw.World) -> None:
    """Average one number by hand, as replicate() does with each gradient."""
    gradient = torch.tensor([1.0, 2.0]) * (world.rank + 1)
    before = rw.all_gather_object(gradient.tolist())
    total = rw.all_reduce(gradient)
    rw.print(f"gradients {before}, their sum {total.tolist()}, their mean {(total / world.world_size).tolist()}")


def train(world: rw.World, data: TensorDataset, epochs: int, *, shuffle: bool) -> list[tuple[float, float]]:
    """Train the net of lesson 1; return the loss on the training set after each epoch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    model = rw.replicate(net.to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = rw.DataLoader(data, global_batch_size=64, shuffle=shuffle)
    images, labels = (tensor.to(world.device) for tensor in data.tensors)
    curve = []
    for epoch in range(epochs):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            curve.append((epoch + 1, nn.functional.cross_entropy(net(images), labels).item()))
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="picture of the three trainings, as .svg")
    options = parser.parse_args()

    with rw.join() as world:
        show_sampler()
        show_all_reduce(world)
        train_set, _ = load()
        images, labels = train_set.tensors
        sorted_set = TensorDataset(images[labels.argsort(stable=True)], labels[labels.argsort(stable=True)])
        curves = {
            "sorted": train(world, sorted_set, options.epochs, shuffle=False),
            "one order": train(world, train_set, options.epochs, shuffle=False),
            "reshuffled": train(world, train_set, options.epochs, shuffle=True),
        }
        for name, curve in curves.items():
            rw.print(f"{name:10}  loss " + "  ".join(f"{loss:.4f}" for _, loss in curve))
        if options.plot and world.rank == 0:
            draw(options.plot, curves, x_label="epoch", y_label="loss on the training set", title="Three orders")


if __name__ == "__main__":
    main()
