# SPDX-License-Identifier: Apache-2.0
"""Where a rank that is asked to stop does not: in a thread of the script's own, and when the job is done."""

from __future__ import annotations

import threading

import torch.distributed as dist

from rankwise.health.event_log import Left, StopRequested, post
from rankwise.health.preemption import Preemption
from rankwise.store.client import Store


def test_a_thread_of_the_script_passes_no_boundary() -> None:
    preemption = Preemption()
    preemption.ask("the test")
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(preemption.is_here()))
    thread.start()
    thread.join()
    assert found == [False]
    assert preemption.is_here()


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    store = Store(dist.HashStore())
    preemption = Preemption(rank=0, world_size=2, store=store, timeout_seconds=30.0)
    for event in (Left(1), StopRequested("the test")):
        post(store, event)
        preemption.read(store, event, 3)
    assert preemption.is_asked
    assert not preemption.is_here()
