# SPDX-License-Identifier: Apache-2.0
"""Lesson 2 of the course: what each rank sees of a batch of 30 samples.

rankwise run -n 2 examples/lesson2_batch_size.py
"""

from __future__ import annotations

import torch
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
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(100, 5), torch.randn(100, 2))
    with rw.join() as world:
        model = rw.replicate(Net().double().to(world.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = rw.DataLoader(data, global_batch_size=30)
        for number, (x, y) in enumerate(loader):
            nn.functional.mse_loss(model(x.double()), y.double()).backward()
            optimizer.step()
            optimizer.zero_grad()
            parts = rw.all_gather(model.seen)  # the number of every rank, on every rank
            rw.print(f"batch {number}: the model sees {' + '.join(map(str, parts))} = {sum(parts)} samples")
        rw.print(f"weights after the epoch: {sum(p.abs().sum().item() for p in model.parameters()):.6f}")


if __name__ == "__main__":
    main()
