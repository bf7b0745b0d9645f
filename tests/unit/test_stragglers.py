# SPDX-License-Identifier: Apache-2.0
"""When a rank that runs on counts as at work, who hears that ranks have ended, and which waits that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from coordinated import Scene

from rankwise.launch.agent.stragglers import Activity, Stragglers, activity_of
from rankwise.launch.controller.server import AttemptKeys
from rankwise.launch.fork_server.torch_env import torch_rank_key
from rankwise.launch.messages import RanksDeparted
from rankwise.store.bootstrap import ENDED, rank_address_key
from rankwise.store.keys import GivenUp, Keys

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(
    ("used", "is_idle"),
    [
        (Activity(0.0, 0), True),
        (Activity(1.4, 2000), True),
        (Activity(1.6, 0), False),
        (Activity(0.0, 1 << 21), False),
        (Activity(0.0, 0, is_runnable=True), False),
    ],
)
def test_a_rank_is_idle_that_neither_computes_nor_reads_nor_writes(used: Activity, *, is_idle: bool) -> None:
    assert used.is_idle(30.0) is is_idle


def test_cpu_time_of_ended_children_does_not_count_backwards() -> None:
    assert Activity(1.0, 10).since(Activity(3.0, 20)) == Activity(0.0, 0)


def test_the_processes_of_a_group_are_counted_together() -> None:
    script = (
        "import os, sys; os.fork() or sum(range(10**7)); sys.stdout.write('done'); sys.stdout.flush(); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 4) == b"done"
        assert process.stdout.read(4) == b"done"
        found = activity_of([process.pid, os.getpid() + 10**7])
        process.communicate()
    assert found[process.pid].cpu_seconds > 0
    assert found[process.pid].num_bytes >= len("donedone")
    assert found[os.getpid() + 10**7] == Activity(0.0, 0)


def _said(stragglers: Stragglers, running: dict[int, int], now: float) -> str:
    """Return what is said at ``now``, once ranks that are to be looked at have been."""
    said = stragglers.notices(running, now)
    for thread in threading.enumerate():
        if thread.name == "rankwise-stragglers":
            thread.join()
    return said + stragglers.notices(running, now)


@pytest.fixture
def stopped() -> Iterator[int]:
    """Return the number of a process that does nothing."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        yield process.pid
        process.kill()


def test_an_idle_rank_is_named_once_and_30_s_after_the_last_end(stopped: int) -> None:
    stragglers = Stragglers(dict, lambda _: False)
    running = {0: stopped}
    assert not _said(stragglers, running, 0.0)
    stragglers.note_ended([1], 10.0)
    assert not _said(stragglers, running, 10.0)
    stragglers.note_ended([1, 2], 35.0)
    assert not _said(stragglers, running, 35.0)
    assert not _said(stragglers, running, 50.0)
    said = _said(stragglers, running, 66.0)
    assert "rank 0 still runs, 31 s after ranks 1-2 exited without an error, and makes no progress" in said
    assert not any(_said(stragglers, running, 66.0 + seconds) for seconds in range(0, 200, 10))


def test_every_machine_with_ranks_is_notified_which_have_ended() -> None:
    scene = Scene((2, 2))
    scene.node_joined("a")
    scene.node_joined("b")
    scene.coordinator.rank_departed(0, 3)
    scene.coordinator.tick(scene.now)
    scene.coordinator.rank_departed(0, 2)
    scene.coordinator.rank_departed(0, 1)
    scene.coordinator.tick(scene.now)
    scene.ranks_ended("b", 0)
    scene.coordinator.rank_departed(0, 0)
    scene.coordinator.tick(scene.now)
    sent = [(to, one.runs) for to, one in scene.sent(RanksDeparted)]
    assert sent == [("a", ((3, 3),)), ("b", ((3, 3),)), ("a", ((1, 2),)), ("b", ((1, 2),)), ("a", ((0, 0),))]


def test_a_rank_that_has_ended_is_marked_where_it_has_not_joined() -> None:
    keys = Keys()
    keys.set(f"attempt/2/{rank_address_key(0)}", b"here")
    absent = AttemptKeys(keys, 2, 4)
    absent.note_ended(0)
    assert keys.peek(f"attempt/2/{rank_address_key(0)}") == b"here"
    absent.note_ended(1)
    assert keys.peek(f"attempt/2/{rank_address_key(1)}") == ENDED.encode()
    keys.set("attempt/2/rankwise/worlds", b"1")
    absent.follow()
    assert [keys.peek(f"attempt/2/join/1/{rank_address_key(rank)}") for rank in range(3)] == [b"ended", b"ended", None]


def test_a_wait_for_a_key_that_will_not_be_set_ends() -> None:
    keys = Keys()
    keys.set(f"attempt/0/{torch_rank_key(0)}", b"")
    keys.set("attempt/0/torch/there", b"value")

    async def wait() -> None:
        waiting = asyncio.ensure_future(keys.wait(["attempt/0/torch/missing"], 60.0))
        await asyncio.sleep(0)
        absent = AttemptKeys(keys, 0, 4)
        absent.note_ended(0)
        await keys.wait(["attempt/0/torch/there"], 0.0)
        await asyncio.sleep(0)
        assert not waiting.done()
        absent.note_ended(1)
        with pytest.raises(GivenUp, match="rank 1 exited without an error before it called init_process_group"):
            await waiting
        await keys.wait(["attempt/0/torch/there"], 0.0)
        with pytest.raises(GivenUp):
            await keys.wait(["attempt/0/torch/other"], 60.0)
        keys.delete_prefix("attempt/0/")
        with pytest.raises(TimeoutError):
            await keys.wait(["attempt/0/torch/other"], 0.0)

    asyncio.run(wait())
