# SPDX-License-Identifier: Apache-2.0
"""The loop with Hugging Face Accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate import Accelerator

if TYPE_CHECKING:
    import torch

    from peer_loops import MakeOptimizer, Serve, Step


def train(serve: Serve) -> None:
    accelerator = Accelerator(cpu=True)

    def prepare(model: torch.nn.Module, make_optimizer: MakeOptimizer) -> Step:
        accelerator.free_memory()
        optimizer = make_optimizer(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)

        def step(x: torch.Tensor) -> None:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        return step

    serve(accelerator.process_index, prepare)
    accelerator.end_training()
