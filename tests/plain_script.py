# SPDX-License-Identifier: Apache-2.0
"""A script for one device, which launchers start with --auto: it trains a small model, prints, and writes files.

Arguments: the folder for its files, which exists; the exit code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Rows and statistics over the whole batch, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the predictions."""
        return self.last(self.drop(self.norm(self.first(x)).tanh()))


def train(folder: Path) -> None:
    """Train; append each loss to a file, and print some."""
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(60, 5, dtype=torch.float64), torch.randn(60, 2, dtype=torch.float64))
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for epoch in range(5):
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with (folder / "losses.txt").open("a") as file:
                print(os.getpid(), epoch, loss.item(), file=file)
        schedule.step()
        print(epoch, schedule.get_last_lr()[0], loss.item(), flush=True)  # noqa: T201 - as scripts do
    torch.save(model.state_dict(), folder / "model.pt")


def check(folder: Path, printed: str) -> None:
    """Hold what the script has printed and written under a launcher against what it does here."""
    plain = folder / "plain"
    plain.mkdir()
    train(plain)
    expected, found = (numbers_of((one / "losses.txt").read_text(encoding="utf-8")) for one in (plain, folder))
    assert len({process for process, *_ in found}) == 1, "one process writes"
    assert [epoch for _, epoch, _ in found] == [epoch for _, epoch, _ in expected]
    assert [loss for *_, loss in numbers_of(printed)] == [loss for *_, loss in found[7::8]]
    losses = (torch.tensor([one[-1] for one in lines], dtype=torch.float64) for lines in (found, expected))
    torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-12)
    states = (torch.load(one / "model.pt") for one in (folder, plain))
    torch.testing.assert_close(*states, rtol=1e-10, atol=1e-12)


def numbers_of(text: str) -> list[list[float]]:
    """Return the numbers of each line."""
    return [[float(word) for word in line.split()] for line in text.splitlines()]


if __name__ == "__main__":
    train(Path(sys.argv[1]))
    sys.exit(int(sys.argv[2]))
