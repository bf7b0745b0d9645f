# SPDX-License-Identifier: Apache-2.0
"""Trainings of every arrangement, as ``make.py`` saved them and as the tests resume them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from kept_models import FEATURES, NUM_SAMPLES, Tensors, adam, momentum, net, numbers, tensors_of, tied
from torch import nn

import rankwise as rw
import rankwise.compat.horovod as hvd
import rankwise.compat.megengine.optimizer as mge_optimizer
from rankwise.comm.session import current

if TYPE_CHECKING:
    from rankwise.world.facts import World

Step = Callable[[torch.Tensor, torch.Tensor], object]
PLAN = {"*.up": "column", "*.down": "row"}


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


def _placed(model: nn.Module, folder: str) -> nn.Module:
    return rw.place(model, {"1": "disk", "": "cpu"}, offload_folder=folder)


@dataclass(frozen=True)
class Arrangement:
    """How a model is laid out, over which axes, and its optimizer."""

    axes: dict[str, int] = field(default_factory=dict)
    build: Callable[[nn.Module], nn.Module] = _as_it_is
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam
    asynchronous: bool = False

    @property
    def world_size(self) -> int:
        return math.prod(self.axes.values())

    @property
    def has_islands(self) -> bool:
        """Whether groups of ranks train apart, so that the result is not that of one device."""
        return "islands" in self.axes


def _split(model: nn.Module) -> nn.Module:
    return rw.tensor_parallel(model, PLAN)


ARRANGEMENTS = {
    "one": Arrangement(),
    "place": Arrangement(),
    "megengine": Arrangement(optimizer=lambda model: mge_optimizer.SGD(model.parameters(), lr=0.05, momentum=0.9)),
    "replicate": Arrangement({"dp_replicate": 2}, rw.replicate),
    "horovod": Arrangement({"dp_replicate": 2}, optimizer=momentum),
    "shard": Arrangement({"dp_shard": 3}, rw.shard),
    "hybrid": Arrangement({"dp_replicate": 2, "dp_shard": 2}, rw.shard, momentum, asynchronous=True),
    "tensor": Arrangement({"tp": 2}, _split, momentum),
    "tensor-shard": Arrangement({"dp_shard": 2, "tp": 2}, lambda model: rw.shard(_split(model))),
    "tensor-replicate": Arrangement({"dp_replicate": 2, "tp": 2}, lambda model: rw.replicate(_split(model)), momentum),
    "pipeline": Arrangement({"pp": 3}),
    "pipeline-replicate": Arrangement({"pp": 2, "dp_replicate": 2}, optimizer=momentum),
    "pipeline-tensor": Arrangement({"pp": 2, "tp": 2}, _split, momentum),
    "islands": Arrangement({"islands": 3}, optimizer=momentum),
    "islands-shard": Arrangement({"islands": 2, "dp_shard": 2}, rw.shard, momentum),
}


class Training:
    """A model laid out on the ranks, with its optimizer, on this rank's part of the same global batches.

    Args:
        name: of an arrangement.
        start: of the numbers of the model.
        folder: for weights that lie on disk.
    """

    def __init__(self, name: str, start: float, folder: str) -> None:
        arrangement = ARRANGEMENTS[name]
        if arrangement.world_size > 1 and name != "horovod":
            rw.mesh(**arrangement.axes)
        self.model = net(start)
        self._take: Step = self._backward
        if name == "place":
            _placed(self.model, folder)
        arrangement.build(self.model)
        if "pp" in arrangement.axes:
            split = [str(number) for number in range(1, arrangement.axes["pp"])]
            example = torch.zeros(2, FEATURES, dtype=torch.float64)
            self._take = rw.pipeline(self.model, nn.functional.mse_loss, example=example, split=split)
        self.objects: dict[str, Any] = {"model": self.model, "optimizer": arrangement.optimizer(self.model)}
        self.optimizer: torch.optim.Optimizer = self.objects["optimizer"]
        if name == "horovod":
            hvd.init()
            named = self.model.named_parameters()
            self.optimizer = self.objects["optimizer"] = hvd.DistributedOptimizer(self.optimizer, named)
        if arrangement.has_islands:
            self.outer = self.objects["outer"] = rw.local_sgd(self.model, every=2, outer="diloco")

    def _backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.mse_loss(self.model(x), y).backward()

    def step(self, number: int) -> None:
        x = numbers(NUM_SAMPLES, FEATURES, start=0.3 * number)
        y = numbers(NUM_SAMPLES, 2, start=0.1 * number)
        data_rank, num_parts = current().data_rank("a test")
        self.optimizer.zero_grad()
        self._take(x.tensor_split(num_parts)[data_rank], y.tensor_split(num_parts)[data_rank])
        self.optimizer.step()

    def state(self) -> Tensors:
        """Return the state on this rank, each tensor whole. Called by: every rank."""
        return tensors_of({name: thing.state_dict() for name, thing in self.objects.items()})


def write_arrangement(_: World, name: str, folder: str) -> tuple[Tensors, Tensors]:
    """Train, save, and take another step; return the saved state, and the model after that step."""
    training = Training(name, 0.0, f"{folder}/disk")
    for number in range(3):
        training.step(number)
    with rw.Checkpointer(f"{folder}/{name}", asynchronous=ARRANGEMENTS[name].asynchronous) as checkpoints:
        checkpoints.save(**training.objects)
    saved = training.state()
    if ARRANGEMENTS[name].has_islands:
        # Each island has an optimizer of its own, of which only the first one's is saved.
        rw.load(f"{folder}/{name}/checkpoint-000001", **training.objects)
    return saved, _after(training)


def _after(training: Training) -> Tensors:
    training.step(3)
    if "outer" in training.objects:
        training.outer.synchronize()
    return tensors_of(training.model.state_dict())


def resume_arrangement(
    world: World, name: str, sources: list[str], kept: str, folder: str
) -> dict[str, tuple[Tensors, Tensors]]:
    """Load the checkpoints of several arrangements; return each loaded state, and the model one step later."""
    training = Training(name, 0.7, f"{folder}/disk-{name}")
    found: dict[str, tuple[Tensors, Tensors]] = {}
    for source in sources:
        assert rw.Checkpointer(f"{kept}/{source}").restore(**training.objects)
        loaded = training.state()
        found[source] = loaded, _after(training)
    return found


def write_weights(world: World, folder: str) -> dict[str, Tensors]:
    """Write a split and sharded model as one file, and one with tied weights."""
    models = {"weights": Training("tensor-shard", 0.0, folder).model, "tied": tied(0.0)}
    for name, model in models.items():
        rw.save_weights(f"{folder}/{name}.safetensors", model)
    return {name: tensors_of(model.state_dict()) for name, model in models.items()}
