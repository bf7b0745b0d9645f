# SPDX-License-Identifier: Apache-2.0
"""Trainings with parameter servers and with an elastic state, as ``make.py`` ran them and as the tests resume them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from kept_models import FEATURES, NUM_SAMPLES, Tensors, adam, net, numbers, tensors_of
from kept_surroundings import Noisy
from torch import nn

import rankwise as rw
import rankwise.compat.horovod as hvd
from rankwise.compat.horovod.elastic.commits import Commits

if TYPE_CHECKING:
    from rankwise.world.facts import World


def serve(
    world: World, servers: tuple[str, int], start: float, num_steps: int, folder: str
) -> list[tuple[Tensors, Any]]:
    """Train with parameter servers that save, up to a step of the training.

    Args:
        world: of workers and servers.
        servers: mode, and how many.
        start: of the numbers of the model.
        num_steps: from the beginning of the training.
        folder: for the snapshots.

    Returns:
        The parameters and the place in the data, at the beginning and at the end; of a server nothing.
    """
    model = net(start)
    for buffer in model.buffers():
        buffer.fill_(0.5)  # snapshots hold parameters only
    mode, num_servers = servers
    # With a bound a worker computes from the newest parameters: the same numbers every time.
    staleness = {"max_staleness": 0} if mode == "async" else {}
    optimizer = adam(model) if mode == "sync" else torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    server = rw.parameter_server(
        model, optimizer, mode=mode, servers=num_servers, directory=folder, save_every=3, **staleness
    )
    loader = rw.DataLoader(Noisy(), global_batch_size=6, shuffle=True)
    server.restore(loader)
    began = tensors_of(dict(model.named_parameters())), loader.state_dict()
    step = loader.epoch * len(loader) + loader.state_dict()["position"] // 6
    for _ in range(loader.epoch, math.ceil(num_steps / len(loader))):
        for x, y, _ in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == num_steps:
                break
    ended_at = loader.state_dict()
    server.synchronize()
    return [] if server.is_server else [began, (tensors_of(dict(model.named_parameters())), ended_at)]


class Elastic:
    """An elastic training whose commits go to a folder, as under ``rankwise run``."""

    def __init__(self, folder: str, attempt: int) -> None:
        hvd.init()
        self.model = net(0.7 * attempt)
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(adam(self.model), named)
        self.sampler = hvd.elastic.ElasticSampler(range(17), seed=4)
        values: dict[str, Any] = {"epoch": 0, "steps": 0, "seen": [], "best": None, "names": {}}
        self.state = hvd.elastic.TorchState(self.model, self.optimizer, sampler=self.sampler, **values)
        self.commits = Commits(Path(folder), run=0, attempt=attempt, is_writer=hvd.local_rank() == 0)
        self.state.commit_to(self.commits)

    def step(self) -> None:
        x = numbers(NUM_SAMPLES, FEATURES, start=0.3 * self.state.steps)
        part = x.tensor_split(hvd.size())[hvd.rank()]
        self.optimizer.zero_grad()
        self.model(part).square().mean().backward()
        self.optimizer.step()
        self.state.steps += 1

    def found(self) -> dict[str, Any]:
        tensors = tensors_of({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        values = {name: getattr(self.state, name) for name in ("epoch", "steps", "seen", "best", "names")}
        return {"tensors": tensors, "values": values, "left": list(self.sampler.remaining_indices)}


def elastic_values() -> dict[str, Any]:
    """Return values of an elastic state, of every kind that a commit may hold."""
    best = [np.float64(0.125), np.arange(3, dtype=np.int16), {1, 2}, 1j, 2**70, b"x", (None, 1.5)]
    return {"epoch": 1, "steps": 2, "seen": [4, 1, 3], "best": best, "names": {3: "three", "a": [1.5]}}


def write_elastic(world: World, folder: str) -> dict[str, Any]:
    training = Elastic(folder, 0)
    training.state.commit()
    for _ in range(2):
        training.step()
    training.sampler.set_epoch(1)
    training.sampler.record_batch(0, 2)
    training.sampler.reset()
    for name, value in elastic_values().items():
        setattr(training.state, name, value)
    training.state.commit()
    found = training.found()
    training.step()
    return {**found, "after": tensors_of(training.model.state_dict())}


def resume_elastic(world: World, folder: str) -> dict[str, Any]:
    training = Elastic(folder, 1)
    newest = training.commits.take_newest()
    assert newest is not None
    training.state.take(newest)
    training.state.sync()
    found = training.found()
    training.step()
    return {**found, "after": tensors_of(training.model.state_dict())}
