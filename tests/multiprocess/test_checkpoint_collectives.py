# SPDX-License-Identifier: Apache-2.0
"""How many collectives a save and a restore take: each waits for the slowest rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from arrangements import trained

from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.comm.session import current
from rankwise.data.loader import DataLoader
from rankwise.replicate.replicate import replicate

if TYPE_CHECKING:
    from pathlib import Path

    from on_ranks import RunRanks

    from rankwise.world.facts import World

MOST_OF_A_SAVE = 10
MOST_OF_A_RESTORE = 8


def _num_collectives() -> int:
    exchange = current().exchange
    assert exchange is not None
    return exchange.detector.recorder.last


def _count(world: World, path: str, arrangement: str, asynchronous: bool) -> dict[str, int]:
    model, optimizer = trained("one" if arrangement == "replicate" else arrangement, world.world_size)
    if arrangement == "replicate":
        model = replicate(model)
    objects: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "loader": DataLoader(list(range(20)), global_batch_size=4),
    }
    checkpoints = Checkpointer(path, asynchronous=asynchronous)
    counts: dict[str, int] = {}
    for call in ("first save", "second save", "restore"):
        before = _num_collectives()
        (checkpoints.save if "save" in call else checkpoints.restore)(**objects)
        counts[call] = _num_collectives() - before
        # What waiting takes depends on how long the disk does.
        checkpoints.wait()
    return counts


@pytest.mark.every_exchange
@pytest.mark.parametrize("arrangement", ["replicate", "shard", "pipeline"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_save_and_a_restore_gather_once_per_phase(
    run_ranks: RunRanks, tmp_path: Path, arrangement: str, asynchronous: bool
) -> None:
    for result in run_ranks(_count, 2, str(tmp_path), arrangement, asynchronous):
        counts = result.get()
        assert max(counts["first save"], counts["second save"]) <= MOST_OF_A_SAVE
        assert counts["restore"] <= MOST_OF_A_RESTORE
