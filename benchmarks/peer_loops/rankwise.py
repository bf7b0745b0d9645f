# SPDX-License-Identifier: Apache-2.0
"""The loop with rankwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rankwise as rw

if TYPE_CHECKING:
    import torch

    from peer_loops import MakeOptimizer, Serve, Step


def prepare(model: torch.nn.Module, make_optimizer: MakeOptimizer) -> Step:
    model = rw.replicate(model)
    optimizer = make_optimizer(model.parameters())

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(serve: Serve) -> None:
    with rw.join() as world:
        serve(world.rank, prepare)
