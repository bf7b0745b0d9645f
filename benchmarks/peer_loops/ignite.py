# SPDX-License-Identifier: Apache-2.0
"""The loop with PyTorch-Ignite's ``ignite.distributed``; its Engine, which is no part of a step, is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ignite.distributed as idist

if TYPE_CHECKING:
    import torch

    from peer_loops import MakeOptimizer, Serve, Step


def prepare(model: torch.nn.Module, make_optimizer: MakeOptimizer) -> Step:
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(make_optimizer(model.parameters()))

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(serve: Serve) -> None:
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(lambda _: serve(idist.get_rank(), prepare))
