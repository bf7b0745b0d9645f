# SPDX-License-Identifier: Apache-2.0
"""A model that was spread over the ranks of a world, when that world has been left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise import testing
from rankwise.errors import NotJoined

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.world.facts import World


def _spread(model: nn.Module, how: str) -> nn.Module:
    if how == "local_sgd":
        rw.mesh(worker_groups=2)
        rw.replicate(model)
        rw.local_sgd(model, every=2)
        return model
    return rw.shard(model) if how == "shard" else rw.replicate(model)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _train_on(world: World, how: str, exchange: str, folder: str) -> None:
    torch.manual_seed(0)
    model = _spread(nn.Linear(4, 3), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 4)
    for _ in range(2):
        _train(model, optimizer, x)
    rw.leave()
    if how == "replicate":
        with torch.no_grad():
            assert model(x).shape == (2, 3)  # which needs nobody
    if world.rank == 0 and how != "local_sgd":
        # The other rank comes to nothing of the kind.
        with pytest.raises(NotJoined, match="world that has been left"):
            _train(model, optimizer, x)
    rw.join(init_method=f"file://{folder}/second", rank=world.rank, world_size=2, exchange=exchange)
    with pytest.raises(NotJoined, match=r"(?s)world that has been left.*build a new model and optimizer"):
        _train(model, optimizer, x)
    assert rw.all_reduce(1) == 2


@pytest.mark.parametrize("exchange", ["auto", "gloo"])
@pytest.mark.parametrize("how", ["replicate", "shard", "local_sgd"])
def test_it_does_not_train_without_the_others_and_says_so(how: str, exchange: str, tmp_path: Path) -> None:
    for result in testing.run_ranks(_train_on, 2, how, exchange, str(tmp_path), exchange=exchange):
        result.get()
