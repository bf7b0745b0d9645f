# SPDX-License-Identifier: Apache-2.0
"""A training whose model is spread in any way: what the tests of combinations run, on CPUs and on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import rankwise as rw

if TYPE_CHECKING:
    from rankwise.world.facts import World

Found = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]

SAMPLES = 9
GLOBAL_BATCH_SIZE = 5
PLAN = {"blocks.*.up": "column", "blocks.*.down": "row"}


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().cpu().clone()


def _here(model: nn.Module, *, gradients: bool) -> dict[str, torch.Tensor]:
    """Return what of the parameters, or of their gradients, is on this rank."""
    tensors = {name: p.grad if gradients else p for name, p in model.named_parameters()}
    return {
        name: _whole(tensor)
        for name, tensor in tensors.items()
        if tensor is not None and not getattr(tensor, "_local_tensor", tensor).is_meta
    }


def train(world: World, strategy: str, sizes: dict[str, int], folder: str) -> Found:
    if sizes:
        rw.mesh(**sizes)
    torch.manual_seed(0)
    model = Net().double().to(world.device)
    if sizes.get("tp", 1) > 1:
        rw.tensor_parallel(model, PLAN)
    loss_fn = nn.functional.mse_loss
    step = None
    if strategy == "shard":
        rw.shard(model)
    elif strategy == "pipeline":
        example = torch.zeros(2, 5, dtype=torch.float64, device=world.device)
        step = rw.pipeline(model, loss_fn, example=example, micro_batches=4)
    elif strategy == "placed":
        plan = {"": world.device, "blocks.1": "disk", "blocks.2": "cpu", "last": "disk"}
        rw.replicate(rw.place(model, plan, offload_folder=folder))
    else:
        rw.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    loader = rw.DataLoader((data[:, :5], data[:, 5:]), global_batch_size=GLOBAL_BATCH_SIZE, seed=3)
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(2):
        for x, y in loader:
            if step is None:
                loss_fn(model(x), y).backward()
            else:
                step(x, y)
            gradients = gradients or _here(model, gradients=True)
            optimizer.step()
            optimizer.zero_grad()
    return gradients, _here(model, gradients=False)


WAYS = [
    ("shard", {"dp_shard": 2}),
    ("shard", {"dp_shard": 4}),
    ("shard", {"dp_replicate": 2, "dp_shard": 2}),
    ("shard", {"dp_shard": 2, "tp": 2}),
    ("shard", {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    ("replicate", {"tp": 2}),
    ("replicate", {"tp": 4}),
    ("replicate", {"dp_replicate": 2, "tp": 2}),
    ("pipeline", {"pp": 2}),
    ("pipeline", {"pp": 4}),
    ("pipeline", {"pp": 2, "dp_replicate": 2}),
    ("pipeline", {"pp": 2, "tp": 2}),
    ("pipeline", {"pp": 2, "dp_replicate": 2, "tp": 2}),
    ("placed", {"dp_replicate": 2}),
    ("placed", {"dp_replicate": 4}),
]
