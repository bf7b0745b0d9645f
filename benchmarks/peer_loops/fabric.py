# SPDX-License-Identifier: Apache-2.0
"""The loop with Lightning Fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning_fabric import Fabric

from peer_loops import LEARNING_RATE

if TYPE_CHECKING:
    from peer_loops import Serve, Step


def train(serve: Serve) -> None:
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()

    def prepare(model: torch.nn.Module) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        model, optimizer = fabric.setup(model, optimizer)

        def step(x: torch.Tensor) -> None:
            fabric.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        return step

    serve(fabric.global_rank, prepare)
    dist.destroy_process_group()
