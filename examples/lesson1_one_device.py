# SPDX-License-Identifier: Apache-2.0
"""Lesson 1 of the course: train a small net on one device, in plain PyTorch.

python examples/lesson1_one_device.py --plot loss.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from curve import draw
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_TRAIN = 1437


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 handwritten digits to train with and 360 to test with: 64 pixels and a label each."""
    data = load_digits()
    images = torch.tensor(data.data) / 16  # pixels from 0 to 1
    labels = torch.tensor(data.target)
    return TensorDataset(images[:NUM_TRAIN], labels[:NUM_TRAIN]), TensorDataset(images[NUM_TRAIN:], labels[NUM_TRAIN:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="picture of the loss over the epochs, as .svg")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    train_set, test_set = load()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(train_set, batch_size=64, shuffle=True)

    curve = []
    for epoch in range(1, options.epochs + 1):
        total = 0.0
        for x, y in loader:
            x, y = x.to(device), y.to(device)  # noqa: PLW2901 - as tutorials write it
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(x)
        curve.append((epoch, total / len(train_set)))
        print(f"epoch {epoch}: loss {curve[-1][1]:.4f}")

    images, labels = (tensor.to(device) for tensor in test_set.tensors)
    with torch.no_grad():
        right = int((model(images).argmax(1) == labels).sum())
    print(f"{right} of {len(labels)} test digits are right")
    if options.plot:
        draw(options.plot, {"loss": curve}, x_label="epoch", y_label="mean loss", title="Loss on one device")


if __name__ == "__main__":
    main()
