# SPDX-License-Identifier: Apache-2.0
"""The promise: N ranks compute what one rank computes, whole loop, whatever the sizes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from on_ranks import one_rank
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import rankwise as rw
from rankwise.comm.backends.shared_memory import SharedMemory
from rankwise.comm.session import current

if TYPE_CHECKING:
    from pathlib import Path

    from on_ranks import RunRanks

    from rankwise.world.facts import World

EPOCHS = 3
TOLERANCE = 1e-10
MOST_RANKS = 4
Parameters = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One training run."""

    num_samples: int
    global_batch_size: int
    micro: int
    batchnorm: bool
    remainder: str
    augmented: bool
    seed: int


def draw(number: int) -> Case:
    """Return the case of a number: odd sizes, tails shorter than the number of ranks."""
    rng = random.Random(number)
    global_batch_size = rng.randint(MOST_RANKS, 14)
    return Case(
        # At least one whole batch; a tail of one sample would leave BatchNorm nothing to normalise by.
        num_samples=rng.choice([n for n in range(global_batch_size, 45) if n % global_batch_size != 1]),
        global_batch_size=global_batch_size,
        micro=rng.choice([1, 1, 2, 3]),
        batchnorm=rng.random() < 0.5,
        remainder=rng.choice(["keep", "keep", "drop"]),
        augmented=rng.random() < 0.3,
        seed=number,
    )


class Net(nn.Module):
    """Two layers, with BatchNorm between them or not."""

    def __init__(self, *, batchnorm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=not batchnorm)
        self.norm = nn.BatchNorm1d(7) if batchnorm else nn.Identity()
        self.last = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples with random noise on them: the same noise on any number of ranks."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(5, dtype=torch.float64) + random.random()
        return self.x[index] + 0.1 * noise, self.y[index]


def prepare(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, rw.DataLoader]:
    """Return what a script sets up before its loop."""
    torch.manual_seed(case.seed)
    x = torch.randn(case.num_samples, 5, dtype=torch.float64)
    y = torch.randn(case.num_samples, 2, dtype=torch.float64)
    # Where ranks can share one copy, they do so in every other case.
    one_copy = case.seed % 2 == 0 and isinstance(current().exchange, SharedMemory)
    model = rw.replicate(
        Net(batchnorm=case.batchnorm).double(), sync_batchnorm=case.batchnorm, one_copy_per_host=one_copy
    )
    # No momentum-free zero gradients here: Adam would blow rounding of a zero up to a whole step.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = rw.DataLoader(
        Noisy(x, y) if case.augmented else TensorDataset(x, y),
        global_batch_size=case.global_batch_size,
        shuffle=True,
        seed=case.seed,
        remainder=case.remainder,
    )
    return model, optimizer, loader


def step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Train on one batch, in unequal microsteps where the case says so."""
    micro = case.micro if not case.batchnorm else 1
    for index, (x_part, y_part) in enumerate(zip(x.tensor_split(micro), y.tensor_split(micro), strict=True)):
        if index < micro - 1:
            with rw.no_sync(model):
                nn.functional.mse_loss(model(x_part), y_part).backward()
        else:
            nn.functional.mse_loss(model(x_part), y_part).backward()
    optimizer.step()
    optimizer.zero_grad()


def _train(_: World, numbers: tuple[int, ...]) -> list[Parameters]:
    trained = []
    for number in numbers:
        case = draw(number)
        model, optimizer, loader = prepare(case)
        for _epoch in range(loader.epoch, EPOCHS):
            for x, y in loader:
                step(case, model, optimizer, x, y)
        trained.append({key: value.clone() for key, value in model.state_dict().items()})
    return trained


def largest_difference(left: Parameters, right: Parameters) -> float:
    """Return the largest difference, relative to the largest element of each tensor."""
    return max(((left[k] - right[k]).abs().max() / right[k].abs().max().clamp(min=1e-3)).item() for k in right)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_any_number_of_ranks_trains_to_the_one_rank_result(run_ranks: RunRanks, first: int) -> None:
    numbers = tuple(range(first, first + 10))
    reference = one_rank(_train, numbers)
    for world_size in range(2, MOST_RANKS + 1):
        for result in run_ranks(_train, world_size, numbers):
            for number, got, expected in zip(numbers, result.get(), reference, strict=True):
                assert largest_difference(got, expected) < TOLERANCE, (world_size, draw(number))


def _train_until(_: World, number: int, folder: str, stop_after: int | None) -> Parameters:
    """Train from the newest checkpoint there is; save and stop in the middle of wherever that is."""
    case = draw(number)
    model, optimizer, loader = prepare(case)
    checkpoints = rw.Checkpointer(folder, keep=2)
    checkpoints.restore(model=model, optimizer=optimizer, loader=loader)
    steps = 0
    for _epoch in range(loader.epoch, EPOCHS):
        for x, y in loader:
            step(case, model, optimizer, x, y)
            steps += 1
            if steps == stop_after:
                checkpoints.save(model=model, optimizer=optimizer, loader=loader)
                return {}
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("world_sizes", [(2, 3, 1), (4, 1, 2), (1, 4, 3)])
@pytest.mark.parametrize("number", [3, 8, 14, 21])
def test_interrupted_anywhere_and_resumed_on_other_ranks_it_is_the_same_run(
    run_ranks: RunRanks, number: int, world_sizes: tuple[int, ...], tmp_path: Path
) -> None:
    rng = random.Random(f"{number} {world_sizes}")
    for world_size in world_sizes[:-1]:
        for result in run_ranks(_train_until, world_size, number, str(tmp_path), rng.randint(1, 3)):
            result.get()
    reference = one_rank(_train, (number,))[0]
    for result in run_ranks(_train_until, world_sizes[-1], number, str(tmp_path), None):
        assert largest_difference(result.get(), reference) < TOLERANCE
