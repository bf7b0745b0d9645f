# SPDX-License-Identifier: Apache-2.0
"""MegEngine's model-parallel tutorial with torch's modules: a part of the model on each of two ranks.

python examples/megengine_two_parts.py

Rank 0 sends the output of its layer to rank 1, which computes the loss; the gradient comes back the same way. Prints
how far the parameters are from those of one process that holds both parts.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

import rankwise.compat.megengine.distributed as dist
from rankwise.compat.megengine.autodiff import GradManager
from rankwise.compat.megengine.functional.distributed import remote_recv, remote_send

BATCH_SIZE = 64
LEARNING_RATE = 0.2


def parts() -> list[nn.Module]:
    """Return the model, for digits [batch, 64], in two parts."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(64, 100), nn.ReLU()).double(),
        nn.Sequential(nn.Linear(100, 10)).double(),
    ]


def batches(epochs: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of all epochs, the same on every rank."""
    data = load_digits()
    images, labels = torch.tensor(data.data) / 16, torch.tensor(data.target)
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(labels), generator=generator) for _ in range(epochs)]
    return [(images[part], labels[part]) for order in orders for part in order.split(BATCH_SIZE)]


def main(epochs: int) -> tuple[list[torch.Tensor], float | None]:
    """Train this rank's part; return its parameters, and the last loss where it is known."""
    device = dist.WORLD.comp_node
    part = parts()[dist.get_rank()].to(device)
    gm = GradManager()
    gm.attach(part.parameters())
    optimizer = torch.optim.SGD(part.parameters(), lr=LEARNING_RATE)
    loss = None
    for x, y in batches(epochs):
        with gm:
            if dist.get_rank() == 0:
                remote_send(part(x.to(device)), dest_rank=1)
                gm.backward()
            else:
                loss = F.cross_entropy(part(remote_recv(src_rank=0)), y.to(device))
                gm.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in part.parameters()], None if loss is None else loss.item()


def in_one_process(epochs: int) -> list[torch.Tensor]:
    """Return the parameters of both parts, trained without anything of several ranks."""
    model = nn.Sequential(*parts())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for x, y in batches(epochs):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    (first, _), (second, last_loss) = dist.launcher(main, n_gpus=2)(options.epochs)
    expected = in_one_process(options.epochs)
    differences = [
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip([*first, *second], expected, strict=True)
    ]
    print(f"last loss {last_loss:.4f}")
    print(f"largest difference, relative: {max(differences):.1e}")
