# SPDX-License-Identifier: Apache-2.0
"""The examples of MegEngine's data page on real ranks: the documented samples of every shard, through its loader.

The documented rules: the order of an epoch is the same on every rank; its first indices come again at its end until the
ranks divide it; rank r of n holds every n-th index from r on, cut into batches. A seed of 0 is taken on several ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import rankwise.compat.megengine.distributed as dist
from rankwise import testing
from rankwise.compat.megengine.data import (
    DataLoader,
    Infinite,
    MapSampler,
    RandomSampler,
    ReplacementSampler,
    SequentialSampler,
    StreamSampler,
)
from rankwise.compat.megengine.data.dataset import ArrayDataset, StreamDataset
from rankwise.compat.megengine.data.transform import Transform
from rankwise.compat.megengine.distributed.functional import remote_recv, remote_send
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.world.facts import World

LENGTH = 20
"""Divisible by 2 ranks; on 3 one index is repeated."""
BATCH_SIZE = 3
WEIGHTS = [float(index % 4) for index in range(LENGTH)]


class Backwards(MapSampler):
    """A sampler of the user's own, which only says in which order."""

    def sample(self) -> list[int]:
        return [*range(len(self.dataset))][::-1]


class Doubled(Transform):
    """Doubles the first field of a sample."""

    def apply(self, input: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: A002 - as MegEngine has it
        first, *others = input
        return (first * 2, *others)


class Numbers(StreamDataset):
    """0 to ``LENGTH``, of which each rank reads its share, as MegEngine's documentation advises."""

    def __iter__(self) -> Iterator[int]:
        yield from range(dist.get_rank(), LENGTH, dist.get_world_size())


def _dataset() -> ArrayDataset:
    return ArrayDataset(np.arange(LENGTH) * 1.0, np.arange(LENGTH))


def _batches(sampler: Any, num_workers: int = 0) -> list[list[int]]:
    return [labels.tolist() for _, labels in DataLoader(_dataset(), sampler=sampler, num_workers=num_workers)]


def _shards(world: World, num_workers: int) -> dict[str, Any]:
    """Return the batches that this rank's loaders gave, by what they were."""
    dataset = _dataset()
    random = RandomSampler(dataset, BATCH_SIZE)
    endless = iter(DataLoader(dataset, sampler=Infinite(SequentialSampler(dataset, BATCH_SIZE))))
    num_batches = len(SequentialSampler(dataset, BATCH_SIZE))
    found = {
        "sequential": _batches(SequentialSampler(dataset, BATCH_SIZE), num_workers),
        "dropped": _batches(SequentialSampler(dataset, BATCH_SIZE, drop_last=True)),
        "chosen": _batches(SequentialSampler(dataset, BATCH_SIZE, indices=[*range(1, LENGTH), 0])),
        "random": [_batches(random, num_workers), _batches(random)],
        "seeded": _batches(RandomSampler(dataset, BATCH_SIZE, seed=7)),
        "drawn": _batches(ReplacementSampler(dataset, BATCH_SIZE, num_samples=2 * LENGTH, weights=WEIGHTS, seed=3)),
        "own": _batches(Backwards(dataset, BATCH_SIZE)),
        "told": _batches(SequentialSampler(dataset, BATCH_SIZE, world_size=4, rank=3)),
        "default": _batches(None),
        "endless": [next(endless)[1].tolist() for _ in range(num_batches + 2)],
        "stream": [batch.tolist() for batch in DataLoader(Numbers(), StreamSampler(BATCH_SIZE))],
    }
    doubled = DataLoader(dataset, SequentialSampler(dataset, BATCH_SIZE), transform=Doubled(), preload=True)
    for values, labels in doubled:
        assert (values.dtype, values.device.type) == (torch.float32, torch.device(world.device).type)
        assert torch.equal(values, 2 * labels)
    assert len(doubled) == num_batches
    return found


def _documented(order: list[int], rank: int, world_size: int, *, drop_last: bool = False) -> list[list[int]]:
    missing = -len(order) % world_size
    own = [*order, *order[:missing]][rank::world_size]
    batches = [own[start : start + BATCH_SIZE] for start in range(0, len(own), BATCH_SIZE)]
    return [batch for batch in batches if len(batch) == BATCH_SIZE or not drop_last]


@pytest.mark.parametrize(("world_size", "num_workers"), [(2, 2), (3, 1)])
def test_every_shard_holds_what_the_documentation_says(world_size: int, num_workers: int) -> None:
    order = [*range(LENGTH)]
    unseeded, seeded, drawn = (np.random.RandomState(seed) for seed in (0, 7, 3))
    epochs = [unseeded.permutation(LENGTH).tolist() for _ in range(2)]
    num_drawn = -(-2 * LENGTH // world_size) * world_size
    shares = [weight / sum(WEIGHTS) for weight in WEIGHTS]
    orders = {
        "sequential": order,
        "chosen": [*order[1:], 0],
        "seeded": seeded.permutation(LENGTH).tolist(),
        "drawn": drawn.choice(LENGTH, size=num_drawn, replace=True, p=shares).tolist(),
        "own": order[::-1],
    }
    results = [result.get() for result in testing.run_ranks(_shards, world_size, num_workers)]
    for rank, found in enumerate(results):
        for name, whole in orders.items():
            assert found[name] == _documented(whole, rank, world_size), name
        assert found["random"] == [_documented(epoch, rank, world_size) for epoch in epochs]
        assert found["dropped"] == _documented(order, rank, world_size, drop_last=True)
        assert found["told"] == _documented(order, 3, 4)
        assert [len(batch) for batch in found["default"]] == [1] * -(-LENGTH // world_size)
        sequential = found["sequential"]
        assert found["endless"] == [*sequential, *sequential[:2]]
        assert [number for batch in found["stream"] for number in batch] == order[rank::world_size]
    for name in ("sequential", "seeded", "own"):
        held = [index for found in results for batch in found[name] for index in batch]
        assert {*held} == {*order}, "every sample is on some rank"
        assert len(held) - LENGTH == -LENGTH % world_size


def _received(world: World, shape: object, dtype: object) -> None:
    client = dist.get_client()
    given = torch.arange(6.0).view(2, 3)
    if world.rank == 0:
        client.user_set("facts", [given.shape, given.dtype])
        remote_send(given, dest_rank=1)
        remote_send(given, dest_rank=1)
    else:
        assert client.user_get("facts") == [torch.Size([2, 3]), torch.float32]
        assert torch.equal(remote_recv(src_rank=0, shape=[2, 3], dtype=np.float32), given)
        remote_recv(src_rank=0, shape=shape, dtype=dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((3, 2), "torch.float32", "expected: shape=[3, 2], dtype=torch.float32"),
        (None, np.dtype("float64"), "expected: dtype=torch.float64"),
        ((2, 3), "float31", "torch has no dtype 'float31'"),
    ],
)
def test_a_received_value_is_compared_with_the_expected_one(shape: object, dtype: object, words: str) -> None:
    receiver = testing.run_ranks(_received, 2, shape, dtype)[1]
    assert isinstance(receiver.error, ConfigurationError)
    assert words in str(receiver.error)
    assert "torch has" in words or "received: shape=[2, 3], dtype=torch.float32" in str(receiver.error)
