# SPDX-License-Identifier: Apache-2.0
"""The loop with rankwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import rankwise as rw
from peer_loops import LEARNING_RATE

if TYPE_CHECKING:
    from peer_loops import Serve, Step


def prepare(model: torch.nn.Module) -> Step:
    model = rw.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(serve: Serve) -> None:
    with rw.join() as world:
        serve(world.rank, prepare)
