# SPDX-License-Identifier: Apache-2.0
"""A script for one device, which launchers start with --auto: it trains a small model, prints, and writes files.

Arguments: the folder for its files, which exists; the exit code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
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


def main() -> None:
    """Train; append each loss to a file, and print it."""
    folder = Path(sys.argv[1])
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    data = TensorDataset(torch.randn(60, 5), torch.randn(60, 2))
    model = Net()
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
    sys.exit(int(sys.argv[2]))


def check(plain: Path, folder: Path, printed: str) -> None:
    """Hold what the script has printed and written under a launcher against what it has written in plain Python."""
    expected, found = (numbers_of((one / "losses.txt").read_text(encoding="utf-8")) for one in (plain, folder))
    assert len({process for process, *_ in found}) == 1, "one process writes"
    assert [loss for *_, loss in found] == pytest.approx([loss for *_, loss in expected], rel=1e-10)
    assert [loss for *_, loss in numbers_of(printed)] == [found[number][-1] for number in range(7, 40, 8)]
    states = [torch.load(one / "model.pt") for one in (plain, folder)]
    torch.testing.assert_close(states[1], states[0], rtol=1e-10, atol=1e-12)


def numbers_of(text: str) -> list[list[float]]:
    """Return the numbers of each line."""
    return [[float(word) for word in line.split()] for line in text.splitlines()]


if __name__ == "__main__":
    main()
