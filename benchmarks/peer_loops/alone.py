# SPDX-License-Identifier: Apache-2.0
"""The loop with no exchange at all: each rank trains a model of its own. The least a step can take."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from peer_loops import LEARNING_RATE

if TYPE_CHECKING:
    from peer_loops import Serve, Step


def prepare(model: torch.nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(serve: Serve) -> None:
    serve(int(os.environ["RANK"]), prepare)
