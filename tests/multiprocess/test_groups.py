# SPDX-License-Identifier: Apache-2.0
"""Collectives of some of the ranks, and the ones whose parts differ: every row comes once, where it should."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import rankwise as rw
from rankwise.comm.backends.shared_memory import SLOT_BYTES
from rankwise.comm.collectives import exchange_of
from rankwise.comm.session import current
from rankwise.errors import CollectiveMismatch, ConfigurationError, NotJoined

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

pytestmark = pytest.mark.every_exchange

WORLD_SIZES = [1, 2, 3, 4]


def _rows(rank: int, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _scatter_sums(world: World, num_rows: int) -> None:
    everyone = [_rows(rank, num_rows) for rank in range(world.world_size)]
    own = _rows(world.rank, num_rows)
    for op, whole in (("sum", sum(everyone)), ("mean", sum(everyone) / world.world_size)):
        expected = torch.as_tensor(whole).tensor_split(world.world_size)[world.rank]
        torch.testing.assert_close(rw.reduce_scatter(own, op), expected, rtol=1e-12, atol=1e-12)
    tree = rw.reduce_scatter({"n": np.full(num_rows, world.rank + 1)}, "max")
    assert tree["n"].tolist() == [world.world_size] * len(np.array_split(range(num_rows), world.world_size)[world.rank])
    scattered = rw.reduce_scatter(own)
    scattered.zero_()
    assert torch.equal(own, _rows(world.rank, num_rows)), "the argument stays, and is no alias of the result"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("num_rows", [0, 1, 7, SLOT_BYTES // 8 + 5])
def test_reduce_scatter(run_ranks: RunRanks, world_size: int, num_rows: int) -> None:
    for result in run_ranks(_scatter_sums, world_size, num_rows):
        result.get()


def _for(source: int, to: int, scale: int) -> dict[str, Any]:
    """What one rank has for another: as many rows as no other pair has, none for some."""
    rows = (source * 5 + to * 3) % 7 * scale
    return {"x": torch.full((rows, 2), 10.0 * source + to), "n": np.int32(source - to)}


def _all_to_all(world: World, scale: int) -> None:
    ranks = range(world.world_size)
    received = rw.all_to_all([_for(world.rank, to, scale) for to in ranks])
    for source in ranks:
        expected = _for(source, world.rank, scale)
        assert torch.equal(received[source]["x"], expected["x"])
        assert received[source]["n"] == expected["n"]
        assert type(received[source]["n"]) is np.int32


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("scale", [1, SLOT_BYTES // 40])
def test_all_to_all(run_ranks: RunRanks, world_size: int, scale: int) -> None:
    for result in run_ranks(_all_to_all, world_size, scale):
        result.get()


def _gather_uneven(world: World) -> tuple[list[Any], list[Any]]:
    predictions = rw.all_gather_uneven({"p": _rows(world.rank, 2 * world.rank), "label": world.rank})
    return predictions, rw.all_gather_uneven(torch.zeros([1] * world.rank))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_gather_uneven(run_ranks: RunRanks, world_size: int) -> None:
    for result in run_ranks(_gather_uneven, world_size):
        predictions, dims = result.get()
        for rank, value in enumerate(predictions):
            assert torch.equal(value["p"], _rows(rank, 2 * rank))
            assert value["label"] == rank
        assert [value.ndim for value in dims] == list(range(world_size))


def _of_a_group(world: World) -> None:
    outer, all_of_us = rw.new_group([3, 0, 2]), rw.new_group([0, 1, 2, 3])
    again, alone = rw.new_group([0, 2, 3]), rw.new_group([1])
    assert rw.all_reduce(1, group=all_of_us) == 4
    if outer.rank is None:
        assert world.rank == 1
        assert rw.all_gather(b"a"[0], group=alone) == [97]
        assert rw.all_reduce(2.0, "mean", group=alone) == 2.0
        with pytest.raises(ConfigurationError, match="Rank 1 is not in the group of ranks 0, 2-3"):
            rw.all_reduce(1, group=outer)
    else:
        assert (outer.ranks, outer.size, outer.ranks[outer.rank]) == ((0, 2, 3), 3, world.rank)
        for group in (outer, again):
            assert rw.all_reduce(float(world.rank), "mean", group=group) == 5 / 3
            assert rw.all_gather(world.rank, group=group) == [0, 2, 3]
            assert rw.broadcast(torch.tensor(world.rank), source=2, group=group) == 2
            assert rw.broadcast_object({"from": world.rank}, source=3, group=group) == {"from": 3}
            assert rw.all_gather_object(str(world.rank), group=group) == ["0", "2", "3"]
            assert rw.reduce_scatter(torch.arange(5), group=group).tolist() == [[0, 3], [6, 9], [12]][group.rank or 0]
            own = torch.tensor([[float(world.rank)]] * 3, dtype=torch.float64)
            assert rw.reduce_scatter(own, "mean", group=group).tolist() == [[5 / 3]]
            sent = rw.all_to_all([[world.rank, to] for to in group.ranks], group=group)
            assert sent == [[source, world.rank] for source in group.ranks]
            rw.barrier(group=group)
        with pytest.raises(ConfigurationError, match="no source rank 1"):
            rw.broadcast(1, source=1, group=outer)
        with pytest.raises(CollectiveMismatch):
            rw.all_reduce(torch.zeros(1 + (world.rank == 3)), group=outer)
    assert rw.all_reduce(1) == 4
    rw.leave()
    rw.join()
    with pytest.raises(NotJoined, match=r"call rankwise\.new_group"):
        rw.all_reduce(1, group=again)


def test_a_group_is_a_world_of_its_own(run_ranks: RunRanks) -> None:
    for result in run_ranks(_of_a_group, 4):
        result.get()


def _some_are_in_more(world: World) -> None:
    first = rw.new_group([0, 1])
    if first.rank is not None:
        exchange = exchange_of(first)
        assert exchange is not None
        assert exchange.dup().all_reduce(torch.ones(1), what="of a twin") == 2
    later = rw.new_group([1, 2])
    if later.rank is not None:
        assert rw.all_reduce(world.rank, group=later) == 3


def test_ranks_that_are_in_more_groups_than_others_can_be_in_another_with_them(run_ranks: RunRanks) -> None:
    for result in run_ranks(_some_are_in_more, 3):
        result.get()


def _wrong(world: World) -> list[str]:
    said = []
    for call in (
        lambda: rw.new_group([]),
        lambda: rw.new_group([0, 0]),
        lambda: rw.new_group([0, 2]),
        lambda: rw.new_group([world.rank]),
        lambda: rw.new_group([0.5]),  # type: ignore[list-item]
        lambda: rw.all_reduce(1, group=[0, 1]),  # type: ignore[arg-type]
        lambda: rw.all_to_all({0: 1, 1: 2}),  # type: ignore[arg-type]
        lambda: rw.reduce_scatter(torch.tensor(1.0)),
        lambda: rw.reduce_scatter(torch.ones(2, dtype=torch.int64), "mean"),
        lambda: rw.all_to_all([1]),
        lambda: rw.all_to_all([torch.ones(1), torch.ones(1).double()]),
    ):
        with pytest.raises(ConfigurationError) as caught:
            call()
        said.append(str(caught.value))
    assert rw.all_reduce(1) == 2
    return said


def test_wrong_groups_and_parts_are_refused_and_the_world_continues(run_ranks: RunRanks) -> None:
    for result in run_ranks(_wrong, 2):
        said = result.get()
        assert all("each once" in text for text in said[:3])
        assert "new_group([0, 2])" in said[2]
        assert "this job has only ranks 0-1" in said[2]
        assert "rank 0: [0]" in said[3]
        assert "rank 1: [1]" in said[3]
        assert "a list of ranks, got [0.5]" in said[4]
        assert "rankwise.new_group(), got list" in said[5]
        assert "a list of values, not dict" in said[6]
        assert "all_reduce()" in said[7]
        assert "divide" in said[8]
        assert "1 values for 2 ranks" in said[9]
        assert "for rank 1: float64[1]" in said[10]


def _other_order_of_keys(world: World) -> list[str]:
    names = ["loss", "right"] if world.rank == 0 else ["right", "loss"]
    own: dict[str, Any] = {name: {"loss": 1.0, "right": 2.0}[name] for name in names}
    said = []
    for call in (
        lambda: rw.all_reduce((own, [1])),
        lambda: rw.broadcast(own),
        lambda: rw.all_gather(own),
        lambda: rw.all_gather_uneven(own),
        lambda: rw.reduce_scatter({name: torch.ones(2) for name in names}),
        lambda: rw.all_to_all([own] * 2),
    ):
        with pytest.raises(CollectiveMismatch) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_values_under_different_keys_are_not_confused(run_ranks: RunRanks) -> None:
    for result in run_ranks(_other_order_of_keys, 2):
        said = result.get()
        assert 'rank 0: all_reduce("sum", [{loss: float64[], right: float64[]}, [int64[]]])' in said[0]
        assert "rank 1: all_gather_uneven({right: float64, loss: float64})" in said[3]


def _open_unequal_numbers(world: World) -> list[float]:
    """Open groups of some ranks, in unequal numbers on the ranks, then groups of all; return sums over each."""
    exchange = current().exchange
    assert exchange is not None
    pair = exchange.split([[0, 1], [2]])
    inner = pair
    for _ in range(world.rank):  # the pair opens another of its own; the third rank two
        if world.rank != 1:
            inner = inner.split([list(range(inner.world_size))])
    groups = [pair, exchange.dup(), exchange.split([[0], [1, 2]]), exchange.dup()]
    group = dist.new_group()  # torch's own, of every rank
    own = torch.ones(1, dtype=torch.float64) * (world.rank + 1)
    sums = [one.all_reduce(own, what=f"sum {number}").item() for number, one in enumerate(groups)]
    dist.all_reduce(own, group=group)
    return [*sums, own.item()]


@pytest.mark.parametrize("exchange", ["gloo", "shared_memory"])
def test_ranks_that_opened_unequal_numbers_of_groups_can_open_more(run_ranks: RunRanks, exchange: str) -> None:
    results = [result.get() for result in run_ranks(_open_unequal_numbers, 3, exchange=exchange)]
    assert results == [[3, 6, 1, 6, 6], [3, 6, 5, 6, 6], [3, 6, 5, 6, 6]]
