# SPDX-License-Identifier: Apache-2.0
"""The loop with Lightning Fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning_fabric import Fabric

if TYPE_CHECKING:
    from peer_loops import MakeOptimizer, Serve, Step


def train(serve: Serve) -> None:
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()

    def prepare(model: torch.nn.Module, make_optimizer: MakeOptimizer) -> Step:
        optimizer = make_optimizer(model.parameters())
        model, optimizer = fabric.setup(model, optimizer)

        def step(x: torch.Tensor) -> None:
            fabric.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        return step

    serve(fabric.global_rank, prepare)
    dist.destroy_process_group()
