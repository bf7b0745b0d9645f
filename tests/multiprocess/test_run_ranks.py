# SPDX-License-Identifier: Apache-2.0
"""`testing.run_ranks`: a rank that does not end says where it was."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

from rankwise import testing

if TYPE_CHECKING:
    from rankwise.world.facts import World


def _one_of_three_ends(world: World) -> str:
    if world.rank == 1:
        threading.Event().wait()
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return "ended"


def test_ranks_that_do_not_end_say_where_they_were() -> None:
    results = testing.run_ranks(_one_of_three_ends, 3, timeout_seconds=8.0)
    assert results[0].get() == "ended"
    waits, stopped = (result.error for result in results[1:])
    assert isinstance(waits, testing.RankDied)
    assert isinstance(stopped, testing.RankDied)
    first, *stack = str(waits).splitlines()
    assert first == "rank 1 was still running after 8 s, at"
    assert any("test_run_ranks.py:19 in _one_of_three_ends" in line for line in stack)
    assert "rank 2 was still running after 8 s, stopped (SIGSTOP" in str(stopped)
