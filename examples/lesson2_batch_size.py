# SPDX-License-Identifier: Apache-2.0
"""Lesson 2 of the course: what each rank sees of a batch of 30 samples.

rankwise run -n 2 examples/lesson2_batch_size.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from curve import draw
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw


class Net(nn.Module):
    """One layer that notes how many samples it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 2)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = len(x)
        return self.fc(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="picture of what each rank sees of each batch, as .svg")
    options = parser.parse_args()

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(100, 5), torch.randn(100, 2))
    with rw.join() as world:
        model = rw.replicate(Net().double().to(world.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = rw.DataLoader(data, global_batch_size=30)
        seen: list[list[int]] = []
        for number, (x, y) in enumerate(loader):
            nn.functional.mse_loss(model(x.double()), y.double()).backward()
            optimizer.step()
            optimizer.zero_grad()
            parts = rw.all_gather(model.seen)  # the number of every rank, on every rank
            seen.append(parts)
            rw.print(f"batch {number}: the model sees {' + '.join(map(str, parts))} = {sum(parts)} samples")
        rw.print(f"weights after the epoch: {sum(p.abs().sum().item() for p in model.parameters()):.6f}")
        if options.plot and world.rank == 0:
            curves = {f"rank {rank}": list(enumerate(own)) for rank, own in enumerate(zip(*seen, strict=True))}
            curves["the whole batch"] = [(number, sum(parts)) for number, parts in enumerate(seen)]
            draw(options.plot, curves, x_label="batch", y_label="samples", title="Samples that the model sees")


if __name__ == "__main__":
    main()
