# SPDX-License-Identifier: Apache-2.0
"""Which ranks a step of a save through the store still waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from rankwise.comm.agreement import StoreRanks
from rankwise.store.client import Store


def _ranks_of(store: Store, rank: int) -> StoreRanks:
    session: Any = SimpleNamespace(world=SimpleNamespace(rank=rank, world_size=3), detector=None)
    return StoreRanks(session, store, "a save")


def test_rank_0_is_missing_until_its_verdict_is_there() -> None:
    store = Store(dist.HashStore())
    for rank in (0, 1):
        store.set(f"rankwise/checkpoint/a save/0/{rank}", "[null]")
    assert [_ranks_of(store, rank)._missing(0) for rank in range(3)] == [[2], [2], [2]]
    store.set("rankwise/checkpoint/a save/0/2", "[null]")
    assert [_ranks_of(store, rank)._missing(0) for rank in range(3)] == [[], [0], [0]]
    store.set("rankwise/checkpoint/a save/0/verdict", "null")
    assert [_ranks_of(store, rank)._missing(0) for rank in range(3)] == [[], [], []]
