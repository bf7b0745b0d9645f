# SPDX-License-Identifier: Apache-2.0
"""Trainings in other libraries' words, with servers, and on worker groups: what tests run on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from spread_training import Net

import rankwise as rw
import rankwise.compat.horovod as hvd
from rankwise.compat.megengine.autodiff import GradManager
from rankwise.compat.megengine.distributed import make_allreduce_cb

if TYPE_CHECKING:
    from rankwise.world.facts import World


def train_in_words(world: World, words: str, num_parts: int) -> dict[str, torch.Tensor]:
    """Train on this rank's part of a batch; of one that is cut into ``num_parts``, where ranks are fewer, on all."""
    hvd.init()
    torch.manual_seed(0)
    model = Net().double().to(world.device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager = GradManager()
    if words == "horovod":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    else:
        manager.attach(model.parameters(), callbacks=[make_allreduce_cb("mean")])
    x = torch.randn(num_parts, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = x[world.rank :: world.world_size].flatten(0, 1).to(world.device)
    for _ in range(3):
        optimizer.zero_grad()
        if words == "horovod":
            model(own).square().mean().backward()
        else:
            with manager:
                manager.backward(model(own).square().mean())
        optimizer.step()
    total = hvd.allreduce(torch.ones(3, device=world.device), op=hvd.Sum)
    assert total.tolist() == [world.world_size] * 3
    parts = rw.all_to_all([torch.full((to,), world.rank, device=world.device) for to in range(world.world_size)])
    assert [part.tolist() for part in parts] == [[source] * world.rank for source in range(world.world_size)]
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def train_seldom(world: World, way: str, num_parts: int) -> dict[str, torch.Tensor]:
    """Train with a parameter server, or on worker groups that exchange every step; on one rank, on the whole batch."""
    torch.manual_seed(0)
    model = Net().double().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own = list(range(num_parts))
    server = outer = None
    if world.world_size > 1:
        if way == "parameter server":
            server = rw.parameter_server(model, optimizer)
            own = own[world.rank :: len(server.workers)]
        else:
            outer = rw.local_sgd(model, every=1)
            own = own[world.rank :: world.world_size]
    x = torch.randn(num_parts, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if server is not None and server.is_server:
        server.serve()
    else:
        for _ in range(3):
            model(x[own].flatten(0, 1).to(world.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if server is not None:
            server.finish()
    if server is not None:
        server.synchronize()
    if outer is not None:
        outer.synchronize()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
