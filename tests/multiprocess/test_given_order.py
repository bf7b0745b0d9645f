# SPDX-License-Identifier: Apache-2.0
"""A sampler's order on several ranks: that of one rank, also after a resume; unlike orders are an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from on_ranks import one_rank
from torch import nn
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import rankwise as rw
from rankwise.errors import ConfigurationError, DatasetError
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from on_ranks import RunRanks

    from rankwise.world.facts import World

LENGTH = 23


class NumPySampler(Sampler[int]):
    """Draws from NumPy's global generator, and is not as long as the dataset."""

    def __len__(self) -> int:
        return 17

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(LENGTH)[:17])  # noqa: NPY002


def sampler_of(kind: str, rank: int) -> Any:
    if kind == "weighted":
        return WeightedRandomSampler(torch.arange(1.0, LENGTH + 1), 30)
    if kind == "own generator":
        # Unseeded in a stranger's script, so that each rank's starts elsewhere.
        return RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(rank))
    if kind == "subset":
        return SubsetRandomSampler(range(3, 20))
    return {"numpy": NumPySampler, "list": lambda: [5, 3, 3, 0, 22, 7]}[kind]()


KINDS = ["weighted", "own generator", "subset", "numpy", "list"]


def _epochs(world: World, kind: str, size: int) -> list[list[list[int]]]:
    torch.manual_seed(world.rank)
    np.random.seed(world.rank)  # noqa: NPY002
    loader = rw.DataLoader(torch.arange(LENGTH), global_batch_size=size, sampler=sampler_of(kind, world.rank))
    before = torch.get_rng_state().tolist()
    epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert torch.get_rng_state().tolist() == before
    return epochs


def together(ranks: list[Any]) -> list[list[list[int]]]:
    """Return the global batches of each epoch from those of each rank."""
    return [
        [[index for part in parts for index in part] for parts in zip(*epoch, strict=True)]
        for epoch in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_is_the_same_on_any_number_of_ranks(kind: str) -> None:
    """The last global batch is short, so that on 4 ranks some have none of it."""
    expected = together([one_rank(_epochs, kind, 7)])
    assert (expected[0] != expected[1]) == (kind != "list")
    for world_size in (2, 3, 4):
        assert together([result.get() for result in run_ranks(_epochs, world_size, kind, 7)]) == expected, world_size


def _model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def _loader(kind: str, rank: int) -> rw.DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(LENGTH, 3, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    return rw.DataLoader(data, global_batch_size=8, sampler=sampler_of(kind, rank))


def _train(loader: rw.DataLoader, model: nn.Module, num_steps: int) -> dict[str, Any]:
    """Train until ``num_steps`` are done, in the middle of an epoch or at its end; return the loader's state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    done = 0
    while True:
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == num_steps:
                return loader.state_dict()


def _trained(world: World, kind: str) -> list[float]:
    model = rw.replicate(_model())
    _train(_loader(kind, world.rank), model, 10)
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


def _begun(world: World, kind: str, num_steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model = rw.replicate(_model())
    state = _train(_loader(kind, world.rank), model, num_steps)
    return state, {name: value.tolist() for name, value in model.state_dict().items()}


def _resumed(world: World, kind: str, num_steps: int, state: dict[str, Any], weights: dict[str, Any]) -> list[float]:
    model = _model()
    model.load_state_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in weights.items()})
    model = rw.replicate(model)
    loader = _loader(kind, world.rank)
    loader.load_state_dict(state)
    _train(loader, model, num_steps)
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_training_is_that_of_one_rank(run_ranks: RunRanks, world_size: int) -> None:
    expected = np.array(one_rank(_trained, "weighted"))
    for result in run_ranks(_trained, world_size, "weighted"):
        np.testing.assert_allclose(result.get(), expected, rtol=1e-10)


@pytest.mark.parametrize(("before", "after", "num_steps"), [(2, 3, 2), (3, 1, 6), (1, 2, 5)])
def test_training_resumes_in_the_middle_of_an_epoch_on_another_number_of_ranks(
    before: int, after: int, num_steps: int
) -> None:
    """An epoch has 4 steps."""
    expected = np.array(one_rank(_trained, "weighted"))
    states = [result.get() for result in run_ranks(_begun, before, "weighted", num_steps)]
    assert all(state == states[0][0] for state, _ in states)
    for result in run_ranks(_resumed, after, "weighted", 10 - num_steps, *states[0]):
        np.testing.assert_allclose(result.get(), expected, rtol=1e-10)


class Unseeded(Sampler[int]):
    """Draws from a generator of NumPy's that is its own: rankwise cannot seed it."""

    def __init__(self, length: int, changed: int) -> None:
        self._length = length
        self._changed = changed

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        order = np.arange(self._length)
        order[self._changed :] = np.random.default_rng().permutation(order[self._changed :])
        return iter(order.tolist())


def _unlike(world: World, changed: int, kind: str) -> None:
    sampler = Unseeded(1000, changed) if world.rank else list(range(1000))
    data = torch.arange(1000)
    if kind == "loader":
        list(rw.DataLoader(data, global_batch_size=100, sampler=sampler))
    else:
        list(rw.ShardedSampler(data, global_batch_size=100, sampler=sampler))
    rw.barrier()


@pytest.mark.parametrize("kind", ["loader", "sampler"])
@pytest.mark.parametrize(("changed", "where"), [(0, "position 0 "), (700, "positions 69")])
def test_orders_that_differ_are_an_error_that_names_the_place(changed: int, where: str, kind: str) -> None:
    errors = [result.error for result in run_ranks(_unlike, 2, changed, kind)]
    assert None not in errors
    (own,) = (error for error in errors if isinstance(error, DatasetError))
    assert f"the first difference is at {where}" in own.what
    assert "rank 0: positions from 0: [0, 1, 2, 3" in (own.evidence or "")
    assert "rank 1: positions from 0: [" in (own.evidence or "")
    assert "default" not in (own.do or "")
    assert "torch.Generator" in (own.do or "")


def _one_has_none(world: World) -> None:
    rw.DataLoader(torch.arange(9), global_batch_size=4, sampler=[1, 2, 3, 4] if world.rank else None)


def test_a_sampler_on_some_ranks_is_an_error_on_all() -> None:
    for result in run_ranks(_one_has_none, 2):
        assert isinstance(result.error, ConfigurationError)
        assert "rank 1: sampler_length=4" in str(result.error)


def _looks(world: World) -> list[list[int]]:
    sampler = WeightedRandomSampler(torch.ones(12), 12)
    loader = rw.DataLoader(torch.arange(12), global_batch_size=4, sampler=sampler)
    if world.rank == 1:
        next(iter(loader))
    return [batch.tolist() for batch in loader]


def test_one_rank_may_look_at_the_first_batch() -> None:
    results = [result.get() for result in run_ranks(_looks, 2)]
    assert [len(part) for part in results] == [3, 3]


def _sampled(world: World, kind: str) -> list[list[list[int]]]:
    sampler = rw.ShardedSampler(LENGTH, global_batch_size=7, sampler=sampler_of(kind, world.rank))
    return [list(sampler) for _ in range(2)]


def test_the_sampler_takes_an_order_too() -> None:
    expected = together([one_rank(_epochs, "weighted", 7)])
    assert together([result.get() for result in run_ranks(_sampled, 3, "weighted")]) == expected[:2]
