# SPDX-License-Identifier: Apache-2.0
"""The doctor says which rank did not answer, and shows what the others found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise import testing
from rankwise.comm.session import current
from rankwise.doctor import examine
from rankwise.doctor.facts import Facts
from rankwise.store.client import Store

if TYPE_CHECKING:
    from rankwise.world.facts import World


def _examine_with_a_silent_rank(world: World) -> list[str]:
    if world.rank == 1:
        # It stops answering between the comparison of speeds and its last report.
        answer = Store.set
        Store.set = lambda self, key, value: None if key.startswith("across/") else answer(self, key, value)  # type: ignore[method-assign]
    own = Facts(rank=world.rank, world_size=world.world_size, source=world.source, machine=examine.examined_machine())
    job, findings = examine.gather_job(current(), own, 1.0, "")
    assert len(job.ranks) == (3 if world.rank == 0 else 1)
    return [finding.what for finding in findings]


def test_a_rank_that_does_not_answer_in_time_is_a_finding() -> None:
    first, *others = [result.get() for result in testing.run_ranks(_examine_with_a_silent_rank, 3)]
    assert first == ["rank 1 did not answer within 1 s"]
    assert others == [[], []]
