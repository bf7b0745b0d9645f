# SPDX-License-Identifier: Apache-2.0
"""MegEngine's data-parallel tutorial with torch's modules: LeNet on scikit-learn's handwritten digits.

python examples/megengine_lenet.py --ranks 2

Uses MegEngine's calls for several ranks; layers, loss and optimizer are torch's. Trains on several ranks and
on one, and prints how far apart their parameters are.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.utils.data import DataLoader, TensorDataset

import rankwise.compat.megengine.distributed as dist
from rankwise.compat.megengine.autodiff import GradManager
from rankwise.compat.megengine.data import RandomSampler, SequentialSampler
from rankwise.compat.megengine.functional.distributed import all_reduce_sum

NUM_TRAIN = 1408
"""Of 1797: 88 batches of 16, which 1, 2 and 4 ranks divide among them without rest."""
GLOBAL_BATCH_SIZE = 16


class LeNet(nn.Module):
    """For images [batch, 1, 32, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.classifier = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        x = F.max_pool2d(self.conv2(x).relu(), 2)
        return self.classifier(self.fc2(self.fc1(x.flatten(1)).relu()).relu())


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test digits, scaled from 8x8 to 32x32 pixels."""
    data = load_digits()
    images = torch.tensor(data.images).unsqueeze(1) / 16
    images = F.interpolate(images, size=(32, 32), mode="bilinear")
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def main(epochs: int) -> tuple[list[torch.Tensor], float]:
    """Train on whatever ranks there are; return the parameters, and the share of test digits that are right."""
    device = dist.WORLD.comp_node
    train_set, test_set = digits()
    sampler = RandomSampler(train_set, GLOBAL_BATCH_SIZE // dist.get_world_size(), drop_last=True, seed=0)
    loader = DataLoader(train_set, batch_sampler=sampler)

    # Rank 0's are those of every other run; the next line gives them to the others.
    torch.manual_seed(dist.get_rank())
    net = LeNet().to(device, torch.float64)
    dist.bcast_list_(net.parameters())
    gm = GradManager()
    gm.attach(net.parameters(), callbacks=[dist.make_allreduce_cb("mean")])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)

    for epoch in range(epochs):
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        for x, y in loader:
            with gm:
                loss = F.cross_entropy(net(x.to(device)), y.to(device))
                gm.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach()
        loss_mean = all_reduce_sum(loss_sum) / (len(loader) * dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} rank(s), epoch {epoch + 1}  loss {loss_mean.item():.4f}")

    right = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for x, y in DataLoader(test_set, batch_sampler=SequentialSampler(test_set, 60, world_size=1, rank=0)):
            right += (net(x.to(device)).argmax(1) == y.to(device)).sum()
    return [parameter.detach().cpu() for parameter in net.parameters()], right.item() / len(test_set)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="1, 2 or 4")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    several = dist.launcher(main, n_gpus=options.ranks)(options.epochs)
    alone = dist.launcher(main, n_gpus=1)(options.epochs)
    differences = [
        ((a - b).abs().max() / b.abs().max()).item()
        for parameters, _ in several
        for a, b in zip(parameters, alone[0][0], strict=True)
    ]
    print(f"accuracy {several[0][1]:.4f}, on one rank {alone[0][1]:.4f}")
    print(f"largest difference, relative: {max(differences):.1e}")
