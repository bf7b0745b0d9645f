# SPDX-License-Identifier: Apache-2.0
"""The two layers of PyTorch's model parallel tutorial: on two devices of one process, then on two ranks.

rankwise run -n 2 examples/toy_model_parallel.py         # or one rank: the first half only
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import TYPE_CHECKING

import torch
from torch import nn

import rankwise as rw

if TYPE_CHECKING:
    from rankwise import World

PROMISE = 1e-10


class ToyModel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net1 = nn.Linear(width, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


def toy(width: int) -> ToyModel:
    """Return the same model every time."""
    torch.manual_seed(0)
    return ToyModel(width).double()


def batch(step: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(20, width, generator=generator, dtype=torch.float64)
    return x, torch.randn(20, 5, generator=generator, dtype=torch.float64)


def train(model: nn.Module, steps: int, width: int) -> None:
    """Train any model, wherever its layers are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step in range(steps):
        x, y = batch(step, width)
        output = model(x)
        nn.functional.mse_loss(output, y.to(output.device)).backward()
        optimizer.step()
        optimizer.zero_grad()


def two_devices() -> dict[str, str]:
    """Return where the layers go here."""
    count = torch.cuda.device_count()
    if count > 1:
        return {"net1": "cuda:0", "net2": "cuda:1"}
    return {"net1": "cuda:0", "net2": "cpu"} if count else {"net1": "cpu", "net2": "disk"}


def train_on_ranks(world: World, model: ToyModel, steps: int, width: int) -> nn.Module:
    """Train with the first layer on rank 0 and the second on rank 1; return this rank's layer."""
    layer = model.net1 if world.rank == 0 else model.net2
    layer.to(world.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.001)
    for step in range(steps):
        x, y = (tensor.to(world.device) for tensor in batch(step, width))
        if world.rank == 0:
            hidden = model.relu(layer(x))
            rw.send(hidden, to=1).backward()  # waits for the gradient that rank 1 sends back
        else:
            hidden = rw.recv(source=0)
            nn.functional.mse_loss(layer(hidden), y).backward()  # sends it
        optimizer.step()
        optimizer.zero_grad()
    return layer


def difference(layer: nn.Module, expected: nn.Module) -> float:
    """Return the largest difference of any parameter, relative to the largest value of its tensor."""
    there, here = expected.state_dict(), layer.state_dict()
    return max(float((here[key].cpu() - there[key]).abs().max() / there[key].abs().max()) for key in there)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="layers of 100 in place of 10000")
    options = parser.parse_args()
    width = 100 if options.small else 10000

    with rw.join() as world, tempfile.TemporaryDirectory() as folder:
        expected = toy(width)
        train(expected, options.steps, width)

        placed = rw.place(toy(width), two_devices(), offload_folder=folder)
        train(placed, options.steps, width)
        differences = [difference(placed, expected)]
        rw.print(rw.placement(placed))
        rw.print(f"two devices: largest difference from one device {differences[0]:.1e}")

        if world.world_size == 2:
            layer = train_on_ranks(world, toy(width), options.steps, width)
            own = difference(layer, expected.net1 if world.rank == 0 else expected.net2)
            differences.append(max(rw.all_gather_object(own)))
            rw.print(f"two ranks: largest difference from one device {differences[1]:.1e}")
    return 0 if max(differences) <= PROMISE else 1


if __name__ == "__main__":
    sys.exit(main())
