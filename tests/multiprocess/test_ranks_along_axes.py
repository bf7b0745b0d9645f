# SPDX-License-Identifier: Apache-2.0
"""Ranks along axes: exchanges of some of them, who takes which samples, and replicas of a split model."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import torch
from replicas import TOLERANCE, batches, largest_difference
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rankwise.comm.backends.protocol import ChannelSize
from rankwise.comm.collectives import barrier
from rankwise.data.loader import DataLoader
from rankwise.data.sampler import ShardedSampler
from rankwise.errors import CollectiveMismatch, ConfigurationError, PeerFailed, RankwiseError
from rankwise.replicate.device_mesh import exchange_along, mesh, submesh
from rankwise.replicate.no_sync_and_weight import no_sync
from rankwise.replicate.replicate import replicate
from rankwise.testing import run_ranks as run_plain_ranks

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World


def _exchange(world: World) -> dict[str, list[float]]:
    mesh(dp_replicate=2, tp=2)
    found: dict[str, list[float]] = {}
    for name in ("tp", "dp_replicate"):
        part = exchange_along(name)
        assert part is not None
        dup = part.dup()
        own = torch.tensor([float(world.rank)])
        (channel,) = dup.channels([ChannelSize(1, 1, torch.float64, torch.device("cpu"))])
        channel.claim()
        channel.body.copy_(own * channel.factor(1.0))
        channel.start(1.0, 1.0, [])
        channel.finish()
        found[name] = [
            part.all_reduce(own, what="sum").item(),
            part.broadcast(own, 1, what="from the second").item(),
            *part.all_gather(own, what="all").flatten().tolist(),
            channel.result.item(),
        ]
    barrier()
    return found


def test_ranks_exchange_along_each_axis(run_ranks: RunRanks) -> None:
    results = [result.get() for result in run_ranks(_exchange, 4)]
    assert [found["tp"] for found in results] == [[1, 1, 0, 1, 0.5]] * 2 + [[5, 3, 2, 3, 2.5]] * 2
    assert [found["dp_replicate"] for found in results] == [[2, 2, 0, 2, 1], [4, 3, 1, 3, 2]] * 2


def _part_that_misses_one(world: World) -> str:
    mesh(dp_replicate=2, tp=2)
    part = exchange_along("tp")
    assert part is not None
    barrier()
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        part.all_reduce(torch.ones(1), what="sums along tp")
        barrier()
    except RankwiseError as error:
        return str(error)
    return "went on"


def test_a_rank_that_dies_is_named_in_and_out_of_its_part(run_ranks: RunRanks) -> None:
    results = run_ranks(_part_that_misses_one, 4)
    for rank in range(3):
        assert "ank 3" in results[rank].get(), rank


def _part_that_leaves_early(world: World) -> str:
    mesh(dp_replicate=2, tp=2)
    part = exchange_along("tp")
    assert part is not None
    # The ranks of the other group do more, and leave later; and have begun other numbers of collectives.
    for _ in range(1 if world.rank < 2 else 40):
        part.all_reduce(torch.ones(1), what="sums along tp")
    return "done"


def test_groups_may_do_different_things_for_different_times(run_ranks: RunRanks) -> None:
    assert [result.get() for result in run_ranks(_part_that_leaves_early, 4)] == ["done"] * 4


def _differs_in_a_part(world: World) -> str:
    mesh(dp_replicate=2, tp=2)
    part = exchange_along("tp")
    assert part is not None
    try:
        part.agree("one thing" if world.rank != 3 else "another")
        part.all_reduce(torch.ones(1), what="sums along tp")
    except RankwiseError as error:
        return str(error)
    return "went on"


def test_ranks_that_call_different_things_in_a_part_are_named_by_their_world_ranks(run_ranks: RunRanks) -> None:
    results = [result.get() for result in run_ranks(_differs_in_a_part, 4)]
    assert results[:2] == ["went on"] * 2
    for text in results[2:]:
        assert "rank 2" in text
        assert "rank 3" in text
        assert "another" in text


def _samples(world: World) -> tuple[list[list[int]], list[list[int]]]:
    mesh(dp_replicate=2, tp=2)
    loader = DataLoader(torch.arange(7), global_batch_size=4, shuffle=False)
    return [batch.tolist() for batch in loader], list(ShardedSampler(7, global_batch_size=4, shuffle=False))


def test_ranks_that_hold_parts_of_one_copy_get_the_same_samples() -> None:
    results = [result.get() for result in run_plain_ranks(_samples, 4)]
    first, second = [[0, 1], [4, 5]], [[2, 3], [6]]
    assert results == [(first, first)] * 2 + [(second, second)] * 2


def _split_and_replicated(world: World, tp: int) -> dict[str, torch.Tensor]:
    mesh(dp_replicate=-1, tp=tp)
    torch.manual_seed(world.rank // tp)  # the second copy begins with other values, and takes over the first one's
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.Linear(3, 3)).double()
    if tp > 1:
        parallelize_module(model, submesh("tp"), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    replicate(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = DataLoader(batches([7])[0], global_batch_size=3, shuffle=False)
    for accumulates in (False, True):
        for x, y in loader:
            if accumulates:
                with no_sync(model):
                    nn.functional.mse_loss(model(x), y).backward()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_replicas_of_a_split_model_train_as_one_device(run_ranks: RunRanks, world_size: int) -> None:
    expected = run_plain_ranks(_split_and_replicated, 1, 1)[0].get()
    for result in run_ranks(_split_and_replicated, world_size, 2):
        assert largest_difference(result.get(), expected) < TOLERANCE


def _refused(world: World, case: str) -> str:
    try:
        if case == "sizes":
            mesh(tp=2 if world.rank else 1, dp_replicate=1 if world.rank else 2)
        elif case == "product":
            mesh(tp=3)
        elif case == "twice":
            mesh(tp=2)
            mesh(tp=2)
        elif case == "loader first":
            DataLoader(torch.arange(7), global_batch_size=4)
            mesh(tp=2)
        elif case == "shard":
            mesh(dp_shard=2)
            replicate(nn.Linear(2, 2))
        elif case == "one rank":
            mesh(tp=2 if world.rank else 2.5)  # type: ignore[arg-type]
        elif case == "one call":
            mesh(tp=2) if world.rank else replicate(nn.Linear(2, 2))
    except (CollectiveMismatch, ConfigurationError, PeerFailed) as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("sizes", "different sizes"),
        ("product", "pass mesh(tp=2), or start 3 ranks"),
        ("twice", "once, right after rankwise.join()"),
        ("loader first", "was called after a DataLoader"),
        ("shard", "laid the ranks out along dp_shard, so replicate() has none left"),
        ("one rank", "must be an int >= 1, or -1, got 2.5"),
        ("one call", "rank 1: rankwise.mesh() at "),
    ],
)
def test_arguments_that_do_not_fit_are_refused_on_every_rank(case: str, words: str) -> None:
    for result in run_plain_ranks(_refused, 2, case):
        assert words in result.get()
