# SPDX-License-Identifier: Apache-2.0
"""The loop written by hand with DistributedDataParallel, which the others are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from peer_loops import MakeOptimizer, Serve, Step


def prepare(model: torch.nn.Module, make_optimizer: MakeOptimizer) -> Step:
    replica = DistributedDataParallel(model)
    optimizer = make_optimizer(replica.parameters())

    def step(x: torch.Tensor) -> None:
        replica(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(serve: Serve) -> None:
    dist.init_process_group("gloo")
    serve(dist.get_rank(), prepare)
    dist.destroy_process_group()
