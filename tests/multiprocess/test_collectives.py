# SPDX-License-Identifier: Apache-2.0
"""One type in, the same type out, on 1 to 4 ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import rankwise as rw
from rankwise import testing
from rankwise.comm.collectives import gather_json
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

pytestmark = pytest.mark.every_exchange

WORLD_SIZES = [1, 2, 3, 4]


def _reduce_everything(world: World) -> dict[str, Any]:
    given = torch.full((3,), float(world.rank + 1))
    reduced = {op: rw.all_reduce(given, op) for op in ("sum", "mean", "min", "max", "product")}
    assert torch.equal(given, torch.full((3,), float(world.rank + 1))), "the argument stays"
    tree = rw.all_reduce({"a": [1, 2.5], "b": (np.arange(3, dtype=np.int32), np.float32(1.5))})
    return {"ops": reduced, "tree": tree}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce(run_ranks: RunRanks, world_size: int) -> None:
    values = torch.arange(1, world_size + 1, dtype=torch.float32)
    expected = {
        "sum": values.sum(),
        "mean": values.mean(),
        "min": values.min(),
        "max": values.max(),
        "product": values.prod(),
    }
    for result in run_ranks(_reduce_everything, world_size):
        got = result.get()
        for op, value in expected.items():
            assert torch.equal(got["ops"][op], value.expand(3))
        (number, real), (array, scalar) = got["tree"]["a"], got["tree"]["b"]
        assert type(number) is int
        assert number == world_size
        assert real == 2.5 * world_size
        assert array.dtype == np.int32
        assert array.tolist() == [0, world_size, 2 * world_size]
        assert type(scalar) is np.float32


def _gather(world: World) -> tuple[list[Any], list[Any], list[Any], Any, Any]:
    gathered = rw.all_gather({"x": torch.tensor([[world.rank]]), "n": world.rank})
    objects = rw.all_gather_object("é" * world.rank)
    # Some fit into one collective, others do not.
    reports = gather_json("x" * 1000 * world.rank, what="a report")
    last = world.world_size - 1
    sent = rw.broadcast(torch.full((2, 2), world.rank), source=last)
    thing = rw.broadcast_object({"rank": world.rank} if world.rank == last else None, source=last)
    rw.barrier()
    return gathered, objects, reports, sent, thing


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gather_and_broadcast(run_ranks: RunRanks, world_size: int) -> None:
    for result in run_ranks(_gather, world_size):
        gathered, objects, reports, sent, thing = result.get()
        assert [row["n"] for row in gathered] == list(range(world_size))
        assert [row["x"].tolist() for row in gathered] == [[[r]] for r in range(world_size)]
        assert objects == ["é" * rank for rank in range(world_size)]
        assert reports == ["x" * 1000 * rank for rank in range(world_size)]
        assert torch.equal(sent, torch.full((2, 2), world_size - 1))
        assert thing == {"rank": world_size - 1}


def _uneven(world: World) -> list[dict[str, torch.Tensor]]:
    rank = world.rank
    return rw.all_gather_uneven({"x": torch.full((rank + 1, 2), rank), "y": torch.full((rank,), rank)})


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_each_of_several_tensors_has_a_shape_of_its_own_on_each_rank(run_ranks: RunRanks, world_size: int) -> None:
    for result in run_ranks(_uneven, world_size):
        for rank, of_rank in enumerate(result.get()):
            assert of_rank["x"].tolist() == [[rank, rank]] * (rank + 1)
            assert of_rank["y"].tolist() == [rank] * rank


def _sends_and_changes(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    value = torch.arange(3.0)
    received = rw.broadcast(value)
    received += world.rank + 1
    return value, received


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_broadcast_value_is_no_alias(run_ranks: RunRanks, world_size: int) -> None:
    for rank, result in enumerate(run_ranks(_sends_and_changes, world_size)):
        value, received = result.get()
        assert value.tolist() == [0.0, 1.0, 2.0]
        assert received.tolist() == [1.0 + rank, 2.0 + rank, 3.0 + rank]


def _empty_and_strided(world: World) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    strided = torch.arange(6.0).view(2, 3).t() * (world.rank + 1)
    return rw.all_reduce(strided), rw.all_gather(torch.empty(0, 2)), rw.all_reduce(torch.empty(0))


@pytest.mark.parametrize("world_size", [1, 3])
def test_empty_and_strided_tensors(run_ranks: RunRanks, world_size: int) -> None:
    factor = world_size * (world_size + 1) / 2
    for result in run_ranks(_empty_and_strided, world_size):
        reduced, gathered, empty = result.get()
        assert torch.equal(reduced, torch.arange(6.0).view(2, 3).t() * factor)
        assert [tuple(part.shape) for part in gathered] == [(0, 2)] * world_size
        assert empty.shape == (0,)


def _wrong_calls(_: World) -> list[str]:
    errors = []
    for call in (
        lambda: rw.all_reduce(torch.ones(1), "avg"),
        lambda: rw.all_reduce(torch.ones(1, dtype=torch.int64), "mean"),
        lambda: rw.all_reduce("text"),
        lambda: rw.broadcast(torch.ones(1), source=7),
    ):
        with pytest.raises(ConfigurationError) as caught:
            call()
        errors.append(str(caught.value))
    return errors


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_arguments_say_what_to_do(world_size: int) -> None:
    for result in testing.run_ranks(_wrong_calls, world_size):
        unknown_op, integer_mean, wrong_kind, no_rank = result.get()
        assert "did you mean 'mean'?" in unknown_op
        assert "sum, mean, min, max, product" in unknown_op
        assert "op='sum' and divide" in integer_mean
        assert "got str" in wrong_kind
        assert f"0 to {world_size - 1}" in no_rank


def _mixed(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(3, 40000, generator=generator, dtype=torch.float64)
    return [
        values[0, :5],
        values[1, :6].bfloat16().view(2, 3),
        values[2, 7].clone(),
        values[:, 3:5].float(),
        torch.empty(0, 4, dtype=torch.float64),
        values[0],  # 320 KB: alone
        torch.complex(values[0, :2], values[1, :2]),
        values[0, :9] > 0,
        (values[1, :7] * 9).to(torch.int8),
        (values[2, :2] * 9).to(torch.uint8),
    ]


def _trees(world: World) -> tuple[Any, ...]:
    own = _mixed(world.rank)
    return rw.all_reduce(own), rw.broadcast(own, world.world_size - 1), rw.all_gather(own)


@pytest.mark.parametrize("world_size", [1, 3])
def test_leaves_of_every_kind_travel_together(run_ranks: RunRanks, world_size: int) -> None:
    of_ranks = [_mixed(rank) for rank in range(world_size)]
    for result in run_ranks(_trees, world_size):
        reduced, sent, gathered = result.get()
        for place, leaves in enumerate(zip(*of_ranks, strict=True)):
            total = leaves[0].clone()
            for leaf in leaves[1:]:
                total = total + leaf
            torch.testing.assert_close(
                reduced[place], total, rtol=3e-2 if total.dtype == torch.bfloat16 else 1e-6, atol=0
            )
            assert torch.equal(sent[place], leaves[-1])
            assert sent[place].dtype == leaves[-1].dtype
            assert [torch.equal(one[place], leaf) for one, leaf in zip(gathered, leaves, strict=True)] == [True] * len(
                leaves
            )
            # A leaf that is kept does not keep the others.
            assert reduced[place].untyped_storage().nbytes() == total.nbytes or total.nbytes > 2**16


def _num_sent(_: World) -> list[int]:
    recorder = current().detector.recorder
    found = []
    for call in (rw.all_reduce, rw.all_gather, rw.broadcast):
        before = recorder.last
        call({"loss": torch.ones(()), "parts": [torch.ones(3), torch.ones(2, 2)]})
        found.append(recorder.last - before)
    return found


def test_small_leaves_are_one_message(run_ranks: RunRanks) -> None:
    over_gloo = run_ranks.keywords["exchange"] == "gloo"  # type: ignore[attr-defined]
    for result in run_ranks(_num_sent, 2):
        # Over Gloo ranks agree on the call first.
        assert result.get() == [2 if over_gloo else 1] * 3
