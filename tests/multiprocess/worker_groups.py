# SPDX-License-Identifier: Apache-2.0
"""What the tests of local_sgd share: a step, and whether all ranks hold the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import rankwise as rw

if TYPE_CHECKING:
    from replicas import Parameters


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def values(model: nn.Module) -> Parameters:
    """Return the whole of each parameter that is on this rank."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
        if not p.is_meta
    }


def assert_same_on_all_ranks(model: nn.Module) -> None:
    for name, value in values(model).items():
        assert all(torch.equal(other, value) for other in rw.all_gather(value)), name
