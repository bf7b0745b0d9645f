# SPDX-License-Identifier: Apache-2.0
"""A training with everything around it, as ``make.py`` saved it and as the tests resume it."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from kept_models import FEATURES, numbers, same_values, tensors_of
from torch import nn
from torch.utils.data import Dataset, RandomSampler

import rankwise as rw

if TYPE_CHECKING:
    from rankwise.world.facts import World


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Samples with random numbers that belong to them."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        noise = torch.rand((), dtype=torch.float64) + np.random.rand()  # noqa: NPY002 - what users draw with
        return numbers(FEATURES, start=index) + noise, numbers(2, start=index), index


def plain_values() -> dict[str, Any]:
    """Return one value of each kind that state may hold."""
    counted: OrderedDict[Any, Any] = OrderedDict(z=1, a=Counter(b=2, c=1))
    return {
        "numbers": [0, -1, 2**70, 2**9000, 0.1, math.inf, -math.inf, math.nan, 1 - 2j, True, False, None, "text \n ü"],
        "nested": {"tuple": (1, (2.5, "x"), []), "ordered": counted, "size": torch.Size([2, 3])},
        "keys": {1: "int", 2.5: "float", None: "none", False: "bool", "1": "text"},
        "numpy": [np.float32(0.1), np.int16(-3), np.bool_(True), np.complex128(1j)],
        "array": np.arange(6, dtype=np.int32).reshape(2, 3),
        "dtypes": [
            (torch.arange(3) * 17 % 5).to(dtype)
            for dtype in (
                *(
                    torch.bool,
                    torch.uint8,
                    torch.int8,
                    torch.uint16,
                    torch.int16,
                    torch.uint32,
                    torch.int32,
                    torch.uint64,
                ),
                *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
                *(torch.float8_e5m2, torch.complex64, torch.complex128),
            )
        ],
        "shapes": [torch.tensor(1.5), torch.zeros(0, 3), torch.arange(6.0).reshape(2, 3).T],
    }


class Surroundings:
    """A training with groups of parameters, a schedule, loaders, a sampler, random numbers and plain values."""

    def __init__(self) -> None:
        # No bias before BatchNorm: its gradient is rounding alone, which Adam makes as large as any other.
        layers = nn.Linear(FEATURES, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2)
        self.model = nn.Sequential(*layers).double()
        self.model[2].register_parameter("tied", self.model[3].weight)
        with torch.no_grad():
            for number, tensor in enumerate(self.model.parameters()):
                tensor.copy_(numbers(*tensor.shape, start=number))
        rw.replicate(self.model, sync_batchnorm=True)
        bias = [one for name, one in self.model.named_parameters() if name.endswith("bias")]
        rest = [one for name, one in self.model.named_parameters() if not name.endswith("bias")]
        groups = [{"params": rest, "weight_decay": 0.1}, {"params": bias, "lr": 0.03}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 9)
        self.loader = rw.DataLoader(Noisy(), global_batch_size=5, shuffle=True, seed=7)
        self.drawn = rw.DataLoader(Noisy(), global_batch_size=4, sampler=RandomSampler(range(23)), seed=8)
        self.sampler = rw.ShardedSampler(23, global_batch_size=4, shuffle=True, seed=9)
        self.random = torch.Generator().manual_seed(3)
        self.extra: dict[str, Any] = {"random": self.random.get_state(), "best": 1.0, "plain": plain_values()}

    @property
    def objects(self) -> dict[str, Any]:
        names = "model", "optimizer", "scheduler", "loader", "drawn", "sampler", "extra"
        return {name: getattr(self, name) for name in names}

    def take(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(x), y).backward()
        self.optimizer.step()
        self.scheduler.step()

    def ahead(self) -> dict[str, Any]:
        """Train to the end of the epoch; return its samples, the random numbers, and the model."""
        after: dict[str, Any] = {"order": []}
        for x, y, index in self.loader:
            self.take(x, y)
            after["order"].append(_on_all_ranks(index))
        after["drawn"] = [_on_all_ranks(index) for _, _, index in self.drawn]
        after["sampler"] = [_on_all_ranks(torch.tensor(batch, dtype=torch.int64)) for batch in self.sampler]
        after["lr"] = [group["lr"] for group in self.optimizer.param_groups]
        after["random"] = torch.rand(3, generator=self.random, dtype=torch.float64).tolist()
        after["model"] = tensors_of(self.model.state_dict())
        return after


def _on_all_ranks(indices: torch.Tensor) -> list[int]:
    """Return the samples of a global batch, lowest first. Called by: every rank."""
    return sorted(torch.cat(rw.all_gather_uneven(indices)).tolist())


def write_surroundings(world: World, folder: str) -> dict[str, Any]:
    """Save in the middle of an epoch, and train to its end."""
    training = Surroundings()
    with rw.Checkpointer(folder, keep=2) as checkpoints:
        for step, (x, y, _) in enumerate(training.loader):
            training.take(x, y)
            if step == 2:
                break
        for loop in (training.drawn, training.sampler):
            for step, _ in enumerate(loop):
                if step == 1:
                    break
        torch.rand(5, generator=training.random)
        training.extra["random"] = training.random.get_state()
        for best in (0.75, 0.5, 0.25):
            training.extra["best"] = best
            checkpoints.save(**training.objects)
        lock = [path.read_text() for path in Path(folder).glob(".rankwise-lock-*")]
        rw.save(f"{folder}-by-save", **training.objects)
    saved = {name: thing.state_dict() for name, thing in training.objects.items() if name != "extra"}
    state = tensors_of({**saved, "random": training.extra["random"]})
    positions = {name: saved[name] for name in ("scheduler", "loader", "drawn", "sampler")}
    for name in ("loader", "drawn", "sampler"):
        # After a loop that ended early the next one is over the next epoch, unless a state is loaded.
        training.objects[name].load_state_dict(positions[name])
    return {"state": state, "positions": positions, "lock": lock, "after": training.ahead()}


def resume_surroundings(world: World, folder: str) -> dict[str, Any]:
    training = Surroundings()
    extra = training.extra = {"random": torch.zeros_like(training.extra["random"]), "best": 0.0, "plain": {}}
    assert rw.Checkpointer(folder).restore(**training.objects)
    training.random.set_state(extra["random"])
    saved = {name: thing.state_dict() for name, thing in training.objects.items() if name != "extra"}
    state = tensors_of({**saved, "random": extra["random"]})
    positions = {name: saved[name] for name in ("scheduler", "loader", "drawn", "sampler")}
    same = same_values(extra["plain"], plain_values())
    return {"state": state, "positions": positions, "best": extra["best"], "same": same, "after": training.ahead()}
