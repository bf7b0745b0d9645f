# SPDX-License-Identifier: Apache-2.0
"""Which dim holds the samples is followed from the loader, not guessed by its size; other rows are named."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from on_ranks import one_rank
from random_models import DRAWING, LENGTH, WIDTH
from replicas import TOLERANCE, Parameters, largest_difference
from said import listening
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankwise.world.facts import World

CANNOT_BE_FOLLOWED = "are for rows that cannot be followed from the"
BATCH = 8


@dataclass
class Graph:
    x: torch.Tensor
    edges: torch.Tensor


class Graphs:
    """A batch of graphs, with the nodes of all in one tensor; no sample has a row of its own but in ``y``."""

    def __init__(self, graphs: list[Graph]) -> None:
        sizes = [len(one.x) for one in graphs]
        starts = torch.tensor([0, *sizes]).cumsum(0)
        self.x = torch.cat([one.x for one in graphs])
        self.edges = torch.cat([one.edges + start for one, start in zip(graphs, starts, strict=False)], 1)
        self.graph = torch.arange(len(graphs)).repeat_interleave(torch.tensor(sizes))
        self.y = self.x.new_tensor([one.x.sum() for one in graphs])


def _graphs() -> list[Graph]:
    drawn = torch.Generator().manual_seed(0)
    return [
        Graph(
            torch.randn(3 + i % 4, WIDTH, dtype=torch.float64, generator=drawn),
            torch.randint(3 + i % 4, (2, 6), generator=drawn),
        )
        for i in range(2 * BATCH)
    ]


class GraphNet(nn.Module):
    """Messages along edges, the sum of each graph's nodes, and dropout of nodes or of graphs."""

    def __init__(self, width: int, pool: str, *, drops_nodes: bool) -> None:
        super().__init__()
        self.node = nn.Linear(WIDTH, width)
        self.graph = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)
        self.pool = pool
        self.drops_nodes = drops_nodes

    def forward(self, batch: Graphs) -> torch.Tensor:
        x, (sources, targets) = self.node(batch.x), batch.edges
        x = (x.new_zeros(x.shape).index_add_(0, targets, x[sources]) + x).tanh()
        if self.drops_nodes:
            x = functional.dropout(x, 0.4)
        zeros = x.new_zeros(len(batch.y), x.shape[1])
        index = batch.graph.unsqueeze(1).expand_as(x)
        if self.pool == "index_add":
            pooled = zeros.index_add(0, batch.graph, x)
        elif self.pool == "mean":
            counts = x.new_zeros(len(batch.y)).scatter_add_(0, batch.graph, x.new_ones(len(x)))
            pooled = zeros.scatter_add_(0, index, x) / counts.unsqueeze(1)
        else:
            pooled = zeros.scatter_reduce(0, index, x, "amax", include_self=False)
        return self.out(functional.dropout(self.graph(pooled).tanh(), 0.4)).squeeze(1)


def _trained(model: nn.Module, loader: Any, loss: Callable[[nn.Module, Any], torch.Tensor]) -> Parameters:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in loader:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def _on_graphs(_: World, width: int, pool: str, *, drops_nodes: bool = False) -> tuple[Parameters, list[str]]:
    torch.manual_seed(0)
    model = rw.replicate(GraphNet(width, pool, drops_nodes=drops_nodes).double())
    loader = rw.DataLoader(_graphs(), global_batch_size=BATCH, collate_fn=Graphs)
    with listening() as said:
        return _trained(model, loader, lambda m, batch: functional.mse_loss(m(batch), batch.y)), list(said)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("width", "pool"), [(8, "index_add"), (4, "mean"), (3, "amax"), (2, "index_add"), (7, "mean")])
def test_dropout_of_pooled_graphs_is_that_of_one_rank(width: int, pool: str, world_size: int) -> None:
    expected = one_rank(_on_graphs, width, pool)[0]
    for result in testing.run_ranks(_on_graphs, world_size, width, pool):
        got, said = result.get()
        assert largest_difference(got, expected) < TOLERANCE
        assert not [one for one in said if CANNOT_BE_FOLLOWED in one]


def _on_nodes(world: World) -> list[str]:
    return _on_graphs(world, 5, "index_add", drops_nodes=True)[1]


def test_dropout_of_nodes_is_named_once_with_its_line() -> None:
    named = [one for one in testing.run_ranks(_on_nodes, 2)[0].get() if CANNOT_BE_FOLLOWED in one]
    assert len(named) == 1
    assert "test_followed_samples.py:" in named[0]
    assert not [one for one in one_rank(_on_nodes) if CANNOT_BE_FOLLOWED in one]


def _sequence_first(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples, 1)


def _on_sequences(_: World, num_workers: int) -> Parameters:
    """Train on sequences as long as a rank's part of the batch, which lie along the second dim."""
    torch.manual_seed(0)
    model = rw.replicate(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Linear(WIDTH, 1)).double())
    data = list(torch.randn(4 * LENGTH, LENGTH, WIDTH, dtype=torch.float64))
    loader = rw.DataLoader(data, global_batch_size=2 * LENGTH, collate_fn=_sequence_first, num_workers=num_workers)
    return _trained(model, loader, lambda m, x: m(x).square().mean())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_in_the_second_dim_of_a_square_batch_are_found(num_workers: int) -> None:
    expected = one_rank(_on_sequences, 0)
    for result in testing.run_ranks(_on_sequences, 2, num_workers):
        assert largest_difference(result.get(), expected) < TOLERANCE


class _Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randn(4 * LENGTH, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator()))


def _on_a_stream(_: World, collate: Callable[[list[torch.Tensor]], torch.Tensor]) -> tuple[Parameters, list[str]]:
    """Train on a rank's part of as many sequences as they are long; dropout comes before anything else."""
    torch.manual_seed(0)
    model = rw.replicate(nn.Sequential(nn.Dropout(0.4), nn.Linear(WIDTH, 1)).double())
    loader = rw.DataLoader(_Stream(), global_batch_size=2 * LENGTH, collate_fn=collate)
    with listening() as said:
        return _trained(model, loader, lambda m, x: m(x).square().mean()), list(said)


def test_samples_of_a_stream_are_found_in_the_second_dim() -> None:
    expected = one_rank(_on_a_stream, _sequence_first)[0]
    for result in testing.run_ranks(_on_a_stream, 2, _sequence_first):
        got, said = result.get()
        assert largest_difference(got, expected) < TOLERANCE
        assert not [one for one in said if CANNOT_BE_FOLLOWED in one]


def _on_joined_rows(_: World, *, is_stream: bool, compare_samples: bool) -> list[str]:
    """Train on rows of several samples one after another, with as many features as a rank has samples."""
    model = rw.replicate(nn.Sequential(nn.Dropout(0.4), nn.Linear(WIDTH, 1)).double())
    data = _Stream() if is_stream else list(torch.randn(4 * WIDTH, LENGTH, WIDTH, dtype=torch.float64))
    loader = rw.DataLoader(
        data, global_batch_size=2 * WIDTH, collate_fn=torch.cat, compare_samples=compare_samples, remainder="drop"
    )
    with listening() as said:
        _trained(model, loader, lambda m, x: m(x).square().mean())
    return [one for one in said if CANNOT_BE_FOLLOWED in one]


@pytest.mark.parametrize(("is_stream", "compare_samples"), [(False, True), (False, False), (True, True)])
def test_features_as_many_as_the_samples_are_not_taken_for_them(is_stream: bool, compare_samples: bool) -> None:
    train = partial(_on_joined_rows, is_stream=is_stream, compare_samples=compare_samples)
    assert len(testing.run_ranks(train, 2)[0].get()) == 1


class Views(nn.Module):
    """Dropout of one of two views of the batch that lie one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.a(torch.cat([x, -x])).chunk(2)
        return functional.dropout(first, 0.4) + second[: len(x)]


class Masked(nn.Module):
    """Noise for the elements that a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        chosen = h[x > 0]
        return chosen + torch.randn(len(chosen), dtype=x.dtype)


class Halves(nn.Module):
    """Dropout of half of a rank's samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.a(x)[: len(x) // 2], 0.4)


def _on_rows(_: World, kind: type[nn.Module]) -> tuple[Parameters, list[str]]:
    torch.manual_seed(0)
    model = rw.replicate(kind().double())
    loader = rw.DataLoader(torch.randn(2 * BATCH, WIDTH, dtype=torch.float64), global_batch_size=BATCH)
    with listening() as said:
        return _trained(model, loader, lambda m, x: m(x).square().sum()), list(said)


def test_dropout_of_one_of_two_views_is_that_of_one_rank() -> None:
    expected = one_rank(_on_rows, Views)[0]
    for result in testing.run_ranks(_on_rows, 3, Views):
        got, said = result.get()
        assert largest_difference(got, expected) < TOLERANCE
        assert not [one for one in said if CANNOT_BE_FOLLOWED in one]


@pytest.mark.parametrize("kind", [Masked, Halves])
def test_draws_for_some_of_the_samples_are_named(kind: type[nn.Module]) -> None:
    said = testing.run_ranks(_on_rows, 2, kind)[0].get()[1]
    assert len([one for one in said if CANNOT_BE_FOLLOWED in one]) == 1


def _all_models(_: World) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, make in DRAWING.items():
        model = rw.replicate(make().double())
        data = torch.randn(12, LENGTH, WIDTH, dtype=torch.float64)
        with listening() as said:
            _trained(model, rw.DataLoader(data, global_batch_size=12), lambda m, x: m(x).square().mean())
        found[name] = [one for one in said if CANNOT_BE_FOLLOWED in one]
    return found


def test_no_report_for_models_whose_draws_are_followed() -> None:
    for result in testing.run_ranks(_all_models, 2):
        assert {name: said for name, said in result.get().items() if said} == {}
