# SPDX-License-Identifier: Apache-2.0
"""Process sets change while ranks run: a member joins, sets are added and removed, ``init()`` begins with new ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from process_sets import total

import rankwise.compat.horovod as hvd
from rankwise.compat.horovod.queue import current_queue

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World


def _joins(world: World) -> tuple[list[float], int]:
    pair, other = hvd.ProcessSet([0, 2]), hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair, other])
    results = []
    if world.rank == 0:
        results = [total(1.0, "x", pair), total(1.0, "of all"), total(1.0, "y", other), total(1.0, "only here")]
    if world.rank == 1:
        results = [total(1.0, "of all"), total(1.0, "y", other)]
    last = hvd.join()
    return [*results, total(1.0, "after")], last


def test_a_rank_that_has_joined_counts_as_zeros_in_its_sets(run_ranks: RunRanks) -> None:
    first, second, joined = (result.get() for result in run_ranks(_joins, 3))
    assert first[0] == [1.0, 2.0, 2.0, 1.0, 3.0]
    assert second[0] == [2.0, 2.0, 3.0]
    assert joined[0] == [3.0]
    assert first[1] == second[1] == joined[1] == 0


def _come_and_go(world: World) -> list[float]:
    hvd.init()
    results = []
    for step in range(3):
        late = hvd.allreduce_async(torch.tensor([1.0]), op=hvd.Sum, name="late")
        pair = hvd.add_process_set([step % 3, (step + 1) % 3])
        assert current_queue().log is not None
        if pair.included():
            results.append(total(world.rank, "x", pair))
        hvd.remove_process_set(pair)
        assert current_queue().log is None
        results.append(hvd.synchronize(late).item())
    hvd.shutdown()
    return results


def test_sets_are_added_and_removed(run_ranks: RunRanks) -> None:
    results = [result.get() for result in run_ranks(_come_and_go, 3)]
    assert results == [[1.0, 3.0, 3.0, 2.0, 3.0], [1.0, 3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 2.0, 3.0]]


def _twice(world: World) -> list[float]:
    results = []
    for _ in range(2):
        pair = hvd.ProcessSet([0, 1])
        hvd.init(process_sets=[pair])
        results.append(total(1.0, "x", pair) if pair.included() else 0.0)
        hvd.shutdown()
    return results


def test_init_after_shutdown_begins_with_new_sets(run_ranks: RunRanks) -> None:
    assert [result.get() for result in run_ranks(_twice, 3)] == [[2.0, 2.0], [2.0, 2.0], [0.0, 0.0]]
