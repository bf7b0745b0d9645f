# SPDX-License-Identifier: Apache-2.0
"""The loop with no exchange at all: each rank trains a model of its own. The least a step can take."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from peer_loops import MakeOptimizer, Serve, Step


def prepare(model: torch.nn.Module, make_optimizer: MakeOptimizer) -> Step:
    optimizer = make_optimizer(model.parameters())

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(serve: Serve) -> None:
    serve(int(os.environ["RANK"]), prepare)
