# SPDX-License-Identifier: Apache-2.0
"""Optional ranks under ``rankwise run``: which processes end, the reports, and the exit code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

BEGINNING = """
    import os, signal, threading, rankwise as rw
    from rankwise.errors import PeerFailed
    from rankwise.health.event_log import post_expendable
    from rankwise.comm.session import current

    def wait_for(*ranks):
        detector = current().detector
        with detector.changed:
            assert detector.changed.wait_for(lambda: all(map(detector.departed, ranks)), 40)
        assert detector.error is None

    attempt = os.environ["RANKWISE_ATTEMPT"]
    world = rw.join()
    store = current().store
    post_expendable(store, range(1, world.world_size))
    rw.barrier()
"""


def test_the_others_continue_without_ranks_that_die_raise_or_are_stopped(command: Command) -> None:
    command.write(
        "train.py",
        BEGINNING
        + """
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 3:
        wait_for(2)
        # Its process cannot end by itself.
        threading.Thread(target=threading.Event().wait).start()
        raise ValueError("bad sample 17")
    if world.rank == 4:
        wait_for(3)
        os.kill(os.getpid(), signal.SIGSTOP)
    if world.rank == 0:
        wait_for(2, 3, 4)
        try:
            rw.all_reduce(1)
        except PeerFailed as error:
            print("in a collective of all:", error.args[0].splitlines()[0])
        store.set("go", "on")
    store.get("go", 40)
    print("well", attempt)
    """,
    )
    ended = command.run("-n", "5", "--max-restarts", "1", "train.py")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert sorted(lines)[1:] == ["well 0", "well 0"]
    assert min(lines).startswith("in a collective of all: Rank 2 failed: SIGKILL.")
    said = ended.stderr
    parts = [
        "[rankwise] rank 2 failed (SIGKILL); the others continue without it\n",
        "[rankwise] rank 3 failed (ValueError: bad sample 17); the others continue without it\nTraceback ",
        "ValueError: bad sample 17\n",
        "[rankwise] rank 4 failed (stopped for ",
    ]
    places = [said.index(part) for part in parts]
    assert places == sorted(places)
    assert all(said.count(part) == 1 for part in (*parts[:2], "Traceback"))
    last = said.splitlines()[-1]
    assert last.startswith(
        "[rankwise] rank 2 failed earlier: SIGKILL; rank 3 failed earlier: ValueError: bad sample 17; rank 4 "
    )
    assert last.endswith("; the others succeeded")


def test_the_last_of_them_and_any_other_rank_end_all(command: Command) -> None:
    command.write(
        "train.py",
        BEGINNING
        + """
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(2)
    if world.rank == (1 if attempt == "0" else 0):
        os.kill(os.getpid(), signal.SIGTERM if attempt == "0" else signal.SIGABRT)
    detector = current().detector
    with detector.changed:
        detector.changed.wait_for(lambda: detector.error, 40)
    raise detector.error
    """,
    )
    ended = command.run("-n", "3", "--max-restarts", "1", "train.py")
    assert ended.returncode == 134, ended.stderr
    first, restarted, second = ended.stderr.partition("[rankwise] restart 1 of 1\n")
    assert restarted
    for part, rank, name in ((first, 1, "SIGTERM"), (second, 0, "SIGABRT")):
        assert part.count("[rankwise] rank 2 failed (SIGKILL); the others continue without it\n") == 1
        assert part.count("[rankwise] rank 2 failed earlier: SIGKILL, last seen in ") == 1
        assert re.search(rf"\[rankwise\] rank {rank} of 3 \(.*\) failed: killed by {name}", part)
