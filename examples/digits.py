# SPDX-License-Identifier: Apache-2.0
"""Train the small convolutional net of the classic MNIST tutorial on scikit-learn's handwritten digits.

Runs on any number of ranks, with the same result:
    python examples/digits.py
    rankwise run -n 2 examples/digits.py
`examples/compare_ranks.py` runs it on one rank and on two, and prints both side by side.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.utils.data import TensorDataset

import rankwise as rw


class Net(nn.Module):
    """Two convolutions and two linear layers, for images [batch, 1, 28, 28]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def digits(dtype: torch.dtype) -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 training and 360 test digits, scaled from 8x8 to 28x28 pixels."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=dtype).unsqueeze(1) / 16
    images = F.interpolate(images, size=(28, 28), mode="bilinear")
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def accuracy(model: nn.Module, test_set: TensorDataset) -> float:
    """Return the share of test digits that all ranks together get right."""
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in rw.DataLoader(test_set, global_batch_size=120):
            right += int((model(x).argmax(1) == y).sum())
    model.train()
    return rw.all_reduce(right) / len(test_set)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument(
        "--compress", choices=["bf16", "fp16", "int8", "powersgd", "top-k"], help="how gradients travel"
    )
    parser.add_argument("--checkpoints", type=Path, help="folder to save to and resume from")
    parser.add_argument("--report", type=Path, help="folder for what compare_ranks.py reads")
    options = parser.parse_args()

    dtype = getattr(torch, options.dtype)
    torch.manual_seed(options.seed)
    with rw.join() as world:
        train_set, test_set = digits(dtype)
        model = rw.replicate(Net().to(world.device, dtype), compress=options.compress)
        optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
        loader = rw.DataLoader(train_set, global_batch_size=options.global_batch_size, shuffle=True, seed=options.seed)
        checkpoints = rw.Checkpointer(options.checkpoints, keep=3) if options.checkpoints else None
        if checkpoints:
            checkpoints.restore(model=model, optimizer=optimizer, loader=loader)

        losses = []
        started = time.perf_counter()
        for epoch in range(loader.epoch, options.epochs):
            batch_losses, sizes = [], []
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                rw.log_value("loss", loss)  # for the report: rankwise run --report DIR
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                batch_losses.append(loss.detach())
                sizes.append(len(y))
            losses.append(rw.mean(batch_losses, sizes))
            rw.print(f"epoch {epoch + 1:2}  loss {losses[-1]:.4f}")
            if checkpoints:
                checkpoints.save(model=model, optimizer=optimizer, loader=loader)
        seconds = time.perf_counter() - started

        reached = accuracy(model, test_set)
        samples_per_second = len(losses) * len(train_set) / seconds
        rw.print(f"accuracy {reached:.4f}   {samples_per_second:.0f} samples/s on {world.world_size} rank(s)")
        if options.report and world.rank == 0:
            options.report.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), options.report / "parameters.pt")
            figures = {"losses": losses, "accuracy": reached, "samples_per_second": samples_per_second}
            (options.report / "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
