# SPDX-License-Identifier: Apache-2.0
"""Models to place, a step of training, and what to compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from pathlib import Path


TOLERANCE = 1e-10


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A tensor of its own, tied weights, a block that is called twice, and layers that read weights themselves."""

    def __init__(self, *, recompute: str = "") -> None:
        super().__init__()
        self.recompute = recompute
        self.shift = nn.Parameter(torch.randn(6))
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList([Block(6) for _ in range(3)])
        self.attention = nn.TransformerEncoderLayer(6, 2, 7, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 13)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.shift
        for block in [*self.blocks, self.blocks[0]]:
            x = self._called(block, x.flatten(0, 1)).unflatten(0, tokens.shape)
        return self.head(self.lstm(self.attention(x))[0])

    def _called(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not self.recompute:
            return block(x)
        return checkpoint(block, x, use_reentrant=self.recompute == "reentrant")


def net(**options: str) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()


def batch_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(13, (5, 3), generator=generator), torch.randint(13, (15,), generator=generator)


def step_of(model: nn.Module, seed: int) -> float:
    x, y = batch_of(seed)
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y)
    loss.backward()
    return loss.item()


def difference(left: nn.Module, right: nn.Module) -> float:
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    return max(float((a[key] - b[key]).abs().max() / b[key].abs().max().clamp(min=1e-6)) for key in a)


def tower(depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(20, 20, bias=False) for _ in range(depth)]).double()


def assert_unchanged(model: nn.Module, state: dict[str, torch.Tensor], folder: Path) -> None:
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not folder.exists() or list(folder.iterdir()) == []
