# SPDX-License-Identifier: Apache-2.0
"""Batch samplers and datasets of whole batches on several ranks: the training of one rank, also after a resume."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from on_ranks import one_rank
from torch import nn
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, TensorDataset

import rankwise as rw
from rankwise.errors import DatasetError
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.world.facts import World

LENGTH = 23
TOKENS = 12
ENDS = [0, 5, 6, 13, 21, 23]
KINDS = [
    "buckets",
    "torch",
    "in workers",
    "batches",
    "batches in workers",
    "stream of batches",
    "torch's loader",
    "several of its batches",
]


class Buckets:
    """As many samples as have at most ``TOKENS`` tokens; how many batches these are differs from epoch to epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in torch.randperm(LENGTH).tolist():
            if sum(1 + one % 7 for one in [*batch, index]) > TOKENS:
                yield batch
                batch = []
            batch.append(index)
        yield batch


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(LENGTH, 6, generator=generator, dtype=torch.float64)
    return drawn[:, :5], drawn[:, 5:]


class Ready(Dataset[dict[str, Any]]):
    """Returns whole batches, augmented; the second one has a single sample."""

    def __len__(self) -> int:
        return len(ENDS) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = (one[ENDS[index] : ENDS[index + 1]] for one in samples())
        return {"x": x + 0.1 * torch.randn(x.shape), "y": y, "names": [f"{row}" for row in range(len(x))], "n": index}


class ReadyStream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Ready()[index] for index in range(len(Ready())))


def loader_of(kind: str, rank: int) -> rw.DataLoader:
    columns = TensorDataset(*samples())
    if kind == "torch":
        order = RandomSampler(columns, generator=torch.Generator().manual_seed(rank))
        return rw.DataLoader(columns, batch_sampler=BatchSampler(order, 7, drop_last=False))
    if kind == "in workers":
        return rw.DataLoader(list(zip(*samples(), strict=True)), batch_sampler=Buckets(), num_workers=2)
    if kind == "buckets":
        return rw.DataLoader(columns, batch_sampler=Buckets())
    if kind == "torch's loader":
        return rw.DataLoader(torch.utils.data.DataLoader(columns, batch_size=7, shuffle=True), batch_size=None)
    if kind == "several of its batches":
        batches = torch.utils.data.DataLoader(columns, batch_size=4, shuffle=True, drop_last=True)
        return rw.DataLoader(batches, global_batch_size=3, collate_fn=torch.utils.data.default_collate)
    if kind == "stream of batches":
        return rw.DataLoader(ReadyStream(), batch_size=None)
    return rw.DataLoader(Ready(), batch_size=None, shuffle=True, num_workers=2 * ("workers" in kind))


def _train(loader: rw.DataLoader, model: nn.Module, num_steps: int) -> tuple[list[int], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken: list[int] = []
    while len(taken) < num_steps:
        for batch in loader:
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
            assert not isinstance(batch, dict) or len(batch["names"]) == len(x)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            taken.append(len(x))
            if len(taken) == num_steps:
                break
    return taken, {name: value.tolist() for name, value in model.state_dict().items()}


def _model() -> nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    return rw.replicate(nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.3), nn.Linear(5, 1)))


def _trained(world: World, kind: str) -> Any:
    return _train(loader_of(kind, world.rank), _model(), 12)


def flat(weights: dict[str, Any]) -> torch.Tensor:
    return torch.cat([torch.tensor(one, dtype=torch.float64).flatten() for one in weights.values()])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_one_rank(kind: str, world_size: int) -> None:
    sizes, weights = one_rank(_trained, kind)
    assert len(set(sizes)) > 1
    ranks = [rank.get() for rank in run_ranks(_trained, world_size, kind)]
    assert [sum(held) for held in zip(*(taken for taken, _ in ranks), strict=True)] == sizes
    for _, held in ranks:
        torch.testing.assert_close(flat(held), flat(weights), rtol=0, atol=1e-12)


def _begun(world: World, kind: str, num_steps: int) -> Any:
    loader, model = loader_of(kind, world.rank), _model()
    _train(loader, model, num_steps)
    return loader.state_dict(), model.state_dict()


def _rest(world: World, kind: str, state: Any = None, weights: Any = None) -> Any:
    """Return what is in the rest of the first epoch, and in the second one."""
    loader, model = loader_of(kind, world.rank), _model()
    if state is not None:
        loader.load_state_dict(state)
        model.load_state_dict(weights)
    return [
        [(batch["y"] if isinstance(batch, dict) else batch[1]).flatten().tolist() for batch in loader] for _ in "ab"
    ]


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 1), (1, 3)])
@pytest.mark.parametrize("kind", ["buckets", "torch", "batches in workers", "stream of batches"])
def test_it_resumes_in_the_middle_of_an_epoch_on_another_number_of_ranks(kind: str, before: int, after: int) -> None:
    whole = one_rank(_rest, kind)
    state, weights = run_ranks(_begun, before, kind, 2)[0].get()
    ranks = [rank.get() for rank in run_ranks(_rest, after, kind, state, weights)]
    epochs = [zip(*of_ranks, strict=True) for of_ranks in zip(*ranks, strict=True)]
    together = [[[y for part in parts for y in part] for parts in batches] for batches in epochs]
    assert together == [whole[0][2:], whole[1]]


class CutByRank(Buckets):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3, 4, 5, 6]] if self.rank else [[0, 1, 2, 3], [4, 5, 6]])


def _cut_differently(world: World) -> None:
    list(rw.DataLoader(TensorDataset(*samples()), batch_sampler=CutByRank(world.rank)))


def test_other_batches_on_a_rank_are_an_error() -> None:
    errors = [rank.error for rank in run_ranks(_cut_differently, 2)]
    found = next(error for error in errors if isinstance(error, DatasetError))
    assert "The batch sampler gave the ranks batches that end elsewhere; the first difference is at position 0" in str(
        found
    )


class DrawsByItself(Dataset[Any]):
    def __init__(self) -> None:
        self.numpy = np.random.default_rng(0)
        self.torch = torch.Generator().manual_seed(3)
        self.python = random.Random(5)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        x, y = (one[index] for one in samples())
        drawn = torch.from_numpy(self.numpy.standard_normal(5)) + torch.randn(5, generator=self.torch)
        return x + drawn + self.python.random(), y


def _draws_by_itself(world: World, num_workers: int) -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(world.world_size)
    model = nn.Sequential(nn.Linear(5, 5), nn.SyncBatchNorm(5), nn.Linear(5, 1))
    for number, parameter in enumerate(model.parameters()):
        nn.init.uniform_(parameter, generator=torch.Generator().manual_seed(number))
    loader = rw.DataLoader(DrawsByItself(), global_batch_size=8, num_workers=num_workers)
    return _train(loader, rw.replicate(model), 6)[1]


@pytest.mark.parametrize(("world_size", "num_workers"), [(2, 0), (3, 2)])
def test_a_dataset_with_generators_of_its_own_is_that_of_one_rank(world_size: int, num_workers: int) -> None:
    """Torch's SyncBatchNorm, as DDP scripts have it, takes the statistics of all ranks."""
    for rank in run_ranks(_draws_by_itself, world_size, num_workers):
        torch.testing.assert_close(flat(rank.get()), flat(one_rank(_draws_by_itself, 0)), rtol=0, atol=1e-12)
