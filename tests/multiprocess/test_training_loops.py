# SPDX-License-Identifier: Apache-2.0
"""Loops as public scripts write them: N ranks come to what the plain script does, written with the fewest lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from replicas import TOLERANCE, largest_difference
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from training_loops import BATCH_SIZE, LOOPS, dataset, parameters_of, plain_batches, plain_mean

import rankwise as rw
from rankwise.errors import PeerMissing

if TYPE_CHECKING:
    from collections.abc import Callable

    from on_ranks import RunRanks
    from replicas import Parameters
    from training_loops import Batches

    from rankwise.world.facts import World


def _on_ranks(_: World) -> dict[str, Parameters]:
    return {
        name: parameters_of(loop(rw.replicate, rw.DataLoader(dataset(), global_batch_size=BATCH_SIZE), rw.mean))
        for name, loop in LOOPS.items()
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_loops_are_exact(run_ranks: RunRanks, num_ranks: int) -> None:
    plain = {
        name: parameters_of(loop(lambda model: model, plain_batches(), plain_mean)) for name, loop in LOOPS.items()
    }
    for result in run_ranks(_on_ranks, num_ranks):
        apart = {name: largest_difference(got, plain[name]) for name, got in result.get().items()}
        assert {name: value for name, value in apart.items() if value > TOLERANCE} == {}


def _train_by_method(model: nn.Module, rank: int, of: int) -> Parameters:
    x, y = (one.tensor_split(of)[rank] for one in dataset().tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        functional.mse_loss(model.forward(x), y).backward()
        optimizer.step()
    return parameters_of(model)


def _by_method(world: World) -> Parameters:
    return _train_by_method(rw.replicate(_linear()), world.rank, world.world_size)


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_model_whose_forward_is_called_as_a_method_is_exact(run_ranks: RunRanks, num_ranks: int) -> None:
    plain = _train_by_method(_linear(), 0, 1)
    for result in run_ranks(_by_method, num_ranks):
        assert largest_difference(result.get(), plain) <= TOLERANCE


def _stop_by_its_own_loss(world: World) -> None:
    model = rw.replicate(_linear())
    loader = rw.DataLoader(dataset(), global_batch_size=BATCH_SIZE)
    for _ in range(3):
        largest = 0.0
        for x, y in loader:
            loss = functional.mse_loss(model(x), y + 100 * world.rank)
            loss.backward()
            largest = max(largest, loss.item())
        if largest > 1000:
            break


def test_a_rank_that_stops_by_its_own_loss_is_named(run_ranks: RunRanks) -> None:
    waiting, _ = run_ranks(_stop_by_its_own_loss, 2)
    assert isinstance(waiting.error, PeerMissing)
    assert "rank 1 has left" in str(waiting.error)
    assert "stop with rankwise.mean(loss, len(x))" in str(waiting.error)


class _Renormalized(nn.Module):
    """Whose forward shortens the rows of the embedding that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 3, max_norm=1.0)
        self.last = nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(rows))


def _train_renormalized(
    model: _Renormalized, batches: Batches, whole: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Parameters:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for rows, y in batches:
        if whole is not None:
            with torch.no_grad():
                model.embedding(whole(rows))
        optimizer.zero_grad()
        functional.mse_loss(model(rows), y).backward()
        optimizer.step()
    return parameters_of(model)


def _rows() -> TensorDataset:
    y = dataset().tensors[1]
    return TensorDataset(torch.arange(len(y)) * 5 % 9, y)


def _renormalized(_: World, whole: Callable[[torch.Tensor], torch.Tensor] | None) -> Parameters:
    model = rw.replicate(_Renormalized().double())
    return _train_renormalized(model, rw.DataLoader(_rows(), global_batch_size=BATCH_SIZE), whole)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_embedding_that_renormalizes_the_rows_of_all_ranks_is_exact(run_ranks: RunRanks, num_ranks: int) -> None:
    batches = torch.utils.data.DataLoader(_rows(), batch_size=BATCH_SIZE)
    plain = _train_renormalized(_Renormalized().double(), batches)
    for result in run_ranks(_renormalized, num_ranks, rw.whole_batch):
        assert largest_difference(result.get(), plain) <= TOLERANCE


def test_an_embedding_that_renormalizes_a_ranks_own_rows_is_an_error(run_ranks: RunRanks) -> None:
    errors = [result.error for result in run_ranks(_renormalized, 2, None)]
    assert any("embedding.weight of _Renormalized is not the same on all ranks in step 1" in str(one) for one in errors)
