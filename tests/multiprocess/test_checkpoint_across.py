# SPDX-License-Identifier: Apache-2.0
"""Trainings saved under one strategy continue under any other, as if they had always been on one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from arrangements import differing
from torch import nn

from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.export import save_weights
from rankwise.checkpoint.import_weights import load_weights
from rankwise.checkpoint.load import load
from rankwise.comm.session import current
from rankwise.pipeline.pipeline import pipeline
from rankwise.place.place import place
from rankwise.replicate.device_mesh import mesh
from rankwise.replicate.replicate import replicate
from rankwise.shard.shard import shard
from rankwise.tensor_parallel.tensor_parallel import tensor_parallel
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.world.facts import World

WIDTH = 13
NUM_SAMPLES = 14
Step = Callable[[torch.Tensor, torch.Tensor], object]


class Block(nn.Module):
    """A residual block whose layers tensor parallelism knows how to split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 30)
        self.act = nn.Tanh()
        self.down = nn.Linear(30, WIDTH)
        self.register_buffer("gain", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x)))) * self.gain.mean()


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, WIDTH), Block(), Block(), nn.Linear(WIDTH, 3)).double()


PLAN = {"*.up": "column", "*.down": "row"}


def _plain(model: nn.Module) -> Step:
    return lambda x, y: nn.functional.mse_loss(model(x), y).backward()


def _one(model: nn.Module, folder: str) -> Step:
    del folder
    return _plain(model)


def _place(model: nn.Module, folder: str) -> Step:
    return _plain(place(model, {"1": "disk", "": "cpu"}, offload_folder=folder))


def _replicate(model: nn.Module, folder: str) -> Step:
    del folder
    return _plain(replicate(model))


def _shard(model: nn.Module, folder: str) -> Step:
    del folder
    return _plain(shard(model))


def _split_and_shard(model: nn.Module, folder: str) -> Step:
    del folder
    return _plain(shard(tensor_parallel(model, PLAN)))


def _split_and_replicate(model: nn.Module, folder: str) -> Step:
    del folder
    return _plain(replicate(tensor_parallel(model, PLAN)))


def _pipeline(model: nn.Module, folder: str) -> Step:
    del folder
    return pipeline(model, nn.functional.mse_loss, example=torch.zeros(4, 5, dtype=torch.float64), split=["2"])


def _split_and_pipeline(model: nn.Module, folder: str) -> Step:
    return _pipeline(tensor_parallel(model, PLAN), folder)


@dataclass(frozen=True)
class Arrangement:
    """A way of laying a model out, and the axes it needs."""

    build: Callable[[nn.Module, str], Step]
    axes: dict[str, int]


ARRANGEMENTS = {
    "one": Arrangement(_one, {}),
    "place": Arrangement(_place, {}),
    "replicate": Arrangement(_replicate, {"dp_replicate": 2}),
    "shard over three": Arrangement(_shard, {"dp_shard": 3}),
    "hybrid": Arrangement(_shard, {"dp_replicate": 2, "dp_shard": 2}),
    "split and shard": Arrangement(_split_and_shard, {"dp_shard": 2, "tp": 2}),
    "split and replicate": Arrangement(_split_and_replicate, {"dp_replicate": 2, "tp": 2}),
    "pipelines": Arrangement(_pipeline, {"pp": 2, "dp_replicate": 2}),
    "split and pipeline": Arrangement(_split_and_pipeline, {"pp": 2, "tp": 2}),
}


def _world_size(name: str) -> int:
    return math.prod(ARRANGEMENTS[name].axes.values())


class Training:
    """A model, laid out, with its optimizer, on this rank's part of the same global batches."""

    def __init__(self, name: str, seed: int, folder: str) -> None:
        self.model = _model(seed)
        self._step = ARRANGEMENTS[name].build(self.model, folder)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
        y = torch.randn(NUM_SAMPLES, 3, generator=generator, dtype=torch.float64)
        data_rank, num_parts = current().data_rank("a test")
        self.optimizer.zero_grad()
        self._step(x.tensor_split(num_parts)[data_rank], y.tensor_split(num_parts)[data_rank])
        self.optimizer.step()


def _train_and_save(world: World, path: str, name: str) -> None:
    if world.world_size > 1:
        mesh(**ARRANGEMENTS[name].axes)
    training = Training(name, 0, f"{path}/{name} on disk")
    for number in range(2):
        training.step(number)
    with Checkpointer(f"{path}/{name}", asynchronous=name == "hybrid") as checkpoints:
        checkpoints.save(model=training.model, optimizer=training.optimizer)
        training.step(2)
        checkpoints.save(model=training.model, optimizer=training.optimizer)
    save_weights(f"{path}/{name}.safetensors", training.model)


def _go_on(world: World, path: str, name: str, sources: list[str]) -> dict[str, float]:
    if world.world_size > 1:
        mesh(**ARRANGEMENTS[name].axes)
    expected = load(f"{path}/one/checkpoint-000002")
    training = Training(name, 1, f"{path}/{name} on disk again")
    found: dict[str, float] = {}
    # The first of them into an optimizer that has no state yet, the others over that of the one before.
    for source in sources:
        load(f"{path}/{source}/checkpoint-000001", model=training.model, optimizer=training.optimizer)
        training.step(2)
        found[source] = max(
            differing(training.model.state_dict(), expected["model"]),
            differing(training.optimizer.state_dict(), expected["optimizer"]),
        )
    training.step(3)
    load_weights(f"{path}/{sources[0]}.safetensors", training.model)
    found["weights"] = differing(training.model.state_dict(), expected["model"])
    return found


@pytest.mark.timeout(300)
def test_a_training_continues_under_every_other_strategy(tmp_path: Path) -> None:
    names = list(ARRANGEMENTS)
    for name in names:
        for result in run_ranks(_train_and_save, _world_size(name), str(tmp_path), name):
            result.get()
    for number, name in enumerate(names):
        sources = names[number + 1 :] + names[: number + 1]
        for result in run_ranks(_go_on, _world_size(name), str(tmp_path), name, sources):
            found = result.get()
            assert list(found) == [*sources, "weights"]
            assert max(found.values()) <= 1e-10, (name, found)
