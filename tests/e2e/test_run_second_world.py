# SPDX-License-Identifier: Apache-2.0
"""Under ``rankwise run`` a world that is joined after another one was left is watched as the first was."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

BEGINNING = """
    import os, signal, sys, torch, rankwise as rw
    from rankwise.health.event_log import post_expendable
    from rankwise.comm.session import current

    def die(rank):
        if world.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    with rw.join() as world:
        if "first" in sys.argv:
            post_expendable(current().store, [1, 2])
        rw.barrier()
    world = rw.join()
    if "second" in sys.argv:
        post_expendable(current().store, [1, 2])
    rw.barrier()
"""


def test_a_rank_that_is_killed_is_named_to_the_others(command: Command) -> None:
    # Who might go in the world before may not in this one.
    command.write(
        "train.py",
        BEGINNING
        + """
    die(1)
    try:
        rw.barrier()
    except rw.errors.PeerFailed as error:
        print(error.args[0].splitlines()[0])
        raise
    """,
    )
    ended = command.run("-n", "3", "train.py", "first")
    assert ended.returncode == 137, ended.stderr
    assert len(ended.stdout.splitlines()) == 2
    assert all(line.startswith("Rank 1 failed: SIGKILL") for line in ended.stdout.splitlines())


def test_ranks_continue_without_optional_ranks(command: Command) -> None:
    command.write(
        "train.py",
        BEGINNING
        + """
    store = current().store
    if world.rank == 0:
        with current().detector.changed:
            assert current().detector.changed.wait_for(lambda: current().detector.departed(1), 40)
        store.set("go", "on")
    else:
        die(1)
    store.get("go", 40)
    print("well")
    """,
    )
    ended = command.run("-n", "3", "train.py", "second")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "well\nwell\n"
    assert "[rankwise] rank 1 failed (SIGKILL); the others continue without it\n" in ended.stderr


def test_all_ranks_save_when_the_launcher_is_asked_to_stop(command: Command) -> None:
    command.write(
        "train.py",
        BEGINNING
        + """
    checkpoints, model = rw.Checkpointer("saved"), torch.nn.Linear(1, 1)
    if world.rank == 0:
        # The launcher is the parent of the ranks' parent.
        with open(f"/proc/{os.getppid()}/stat") as facts:
            os.kill(int(facts.read().split()[3]), signal.SIGUSR2)
    while True:
        checkpoints.stop_if_asked(model=model)
    """,
    )
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 75, ended.stderr
