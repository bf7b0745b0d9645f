# SPDX-License-Identifier: Apache-2.0
"""The loop with Hugging Face Accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from peer_loops import LEARNING_RATE

if TYPE_CHECKING:
    from peer_loops import Serve, Step


def train(serve: Serve) -> None:
    accelerator = Accelerator(cpu=True)

    def prepare(model: torch.nn.Module) -> Step:
        accelerator.free_memory()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        model, optimizer = accelerator.prepare(model, optimizer)

        def step(x: torch.Tensor) -> None:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        return step

    serve(accelerator.process_index, prepare)
    accelerator.end_training()
