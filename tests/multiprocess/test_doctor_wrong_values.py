# SPDX-License-Identifier: Apache-2.0
"""The doctor compares what arrives: a connection that changes values is a finding with the ranks at its ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise import testing
from rankwise.comm.session import current
from rankwise.doctor import examine
from rankwise.doctor.checks import judge
from rankwise.doctor.facts import Facts

if TYPE_CHECKING:
    import torch

    from rankwise.world.facts import World


def _examine(world: World, corrupts: str) -> list[tuple[str, str]]:
    all_reduce, all_to_all = examine.all_reduce, examine.all_to_all

    def changed_sum(value: Any, *words: str) -> Any:
        total = all_reduce(value, *words)
        if not words and total.numel() * 4 == examine.TIMED_BYTES[1]:
            total[-1] += 1
        return total

    def changed_pair(values: list[torch.Tensor]) -> list[torch.Tensor]:
        received = all_to_all(values)
        received[0][7] = -1
        return received

    if world.rank == 1 and corrupts == "sum":
        examine.all_reduce = changed_sum
    if world.rank == 2 and corrupts == "pair":
        examine.all_to_all = changed_pair
    own = Facts(rank=world.rank, world_size=world.world_size, source=world.source, machine=examine.examined_machine())
    job, _ = examine.gather_job(current(), own, 30.0, "")
    return [(finding.level, finding.what) for finding in judge(job) if finding.check == "values"]


def test_changed_values_are_found_with_the_ranks() -> None:
    found = {corrupts: testing.run_ranks(_examine, 3, corrupts)[0].get() for corrupts in ("nothing", "sum", "pair")}
    assert found == {
        "nothing": [("ok", "all_reduce and all_to_all are exact on every rank")],
        "sum": [("error", "all_reduce of 1 MiB gave rank 1 wrong values")],
        "pair": [("error", "rank 2 received wrong values from rank 0")],
    }
