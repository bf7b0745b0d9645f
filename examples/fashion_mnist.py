# SPDX-License-Identifier: Apache-2.0
"""Train a small convolutional net on Fashion-MNIST (Debian's dataset-fashion-mnist, or any idx files).

rankwise run -n 2 examples/fashion_mnist.py --epochs 3
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.utils.data import TensorDataset

import rankwise as rw

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
NUM_DIMS_BYTE = 3


def read_idx(path: Path) -> torch.Tensor:
    """Return the array of an idx file of bytes, plain or gzipped."""
    compressed = path.with_name(path.name + ".gz")
    if compressed.exists():
        content = gzip.decompress(compressed.read_bytes())
    elif path.exists():
        content = path.read_bytes()
    else:
        message = f"{path} is missing (also as .gz); on Debian: apt-get install dataset-fashion-mnist"
        raise SystemExit(message)
    num_dims = content[NUM_DIMS_BYTE]
    shape = np.frombuffer(content, dtype=">i4", count=num_dims, offset=4)
    values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * num_dims)
    return torch.from_numpy(values.reshape(tuple(shape)).copy())


def load(folder: Path, part: str, limit: int | None) -> TensorDataset:
    """Return images [n, 1, 28, 28] as bytes, and their labels [n]."""
    images = read_idx(folder / f"{part}-images-idx3-ubyte")[:limit].unsqueeze(1)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte")[:limit].long()
    return TensorDataset(images, labels)


def build() -> nn.Module:
    """Return a net for images [batch, 1, 28, 28] with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DEBIAN_FOLDER, help="folder with the four idx files")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch-size", type=int, default=128)
    parser.add_argument("--limit", type=int, help="use only so many images of each part")
    parser.add_argument("--checkpoints", type=Path, help="folder to save to and resume from")
    options = parser.parse_args()

    torch.manual_seed(0)
    with rw.join() as world:
        train_set = rw.share(lambda: load(options.data, "train", options.limit))
        test_set = rw.share(lambda: load(options.data, "t10k", options.limit))
        model = rw.replicate(build().to(world.device), sync_batchnorm=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        loader = rw.DataLoader(train_set, global_batch_size=options.global_batch_size, shuffle=True)
        checkpoints = rw.Checkpointer(options.checkpoints, keep=2) if options.checkpoints else None
        if checkpoints:
            checkpoints.restore(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(loader.epoch, options.epochs):
            losses, sizes = [], []
            for x, y in rw.progress(loader, desc=f"epoch {epoch + 1}", leave=False):
                loss = F.cross_entropy(model(x / 255), y)
                rw.log_value("loss", loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                sizes.append(len(y))
            model.eval()
            right = 0
            with torch.no_grad():
                for x, y in rw.DataLoader(test_set, global_batch_size=1000):
                    right += int((model(x / 255).argmax(1) == y).sum())
            model.train()
            loss_mean = rw.mean(losses, sizes)
            rw.print(f"epoch {epoch + 1}  loss {loss_mean:.4f}  accuracy {rw.all_reduce(right) / len(test_set):.4f}")
            if checkpoints:
                checkpoints.save(model=model, optimizer=optimizer, loader=loader)


if __name__ == "__main__":
    main()
