# SPDX-License-Identifier: Apache-2.0
"""The loop with PyTorch-Ignite's ``ignite.distributed``; its Engine, which is no part of a step, is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ignite.distributed as idist
import torch

from peer_loops import LEARNING_RATE

if TYPE_CHECKING:
    from peer_loops import Serve, Step


def prepare(model: torch.nn.Module) -> Step:
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(serve: Serve) -> None:
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(lambda _: serve(idist.get_rank(), prepare))
