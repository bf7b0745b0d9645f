# SPDX-License-Identifier: Apache-2.0
"""Ranks that end without an error while others run on under ``rankwise run``: what is said of whom, and when."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import Command
    from tests.warm import Started

QUICKLY = """
import sys
from rankwise.cli import main
from rankwise.launch.agent import stragglers
from rankwise.store import bootstrap

bootstrap.NOTICE_SECONDS = stragglers.NOTICE_SECONDS = 0.5
sys.exit(main(["run", *sys.argv[1:]]))
"""


def _start(command: Command, *words: str) -> Started:
    """Start ``rankwise run`` with half a second in the place of 30; its stdout is its stderr."""
    for name in ("gate", "ready"):
        os.mkfifo(command.folder / name)
    command.write("quickly.py", QUICKLY)
    return command.start_python("quickly.py", *words, stderr=subprocess.STDOUT)


def _until(started: Started, words: str) -> str:
    """Return what is said up to a line with these words."""
    assert started.stdout is not None
    said = ""
    for line in started.stdout:
        said += line
        if words in line:
            return said
    pytest.fail(f"{words!r} was never said:\n{said}")


def _open(gate: Path) -> None:
    """Let the rank go on that reads from the gate."""
    gate.write_text("")


def _rest(started: Started) -> str:
    assert started.stdout is not None
    with started, started.stdout:
        return started.stdout.read()


def test_a_rank_held_up_in_an_exit_handler_is_named_once_and_not_ended(command: Command) -> None:
    command.write(
        "train.py",
        """
        import atexit, os

        def close_logger():
            open("ready", "w").close()
            open("gate").read()

        if os.environ["RANK"] == "1":
            atexit.register(close_logger)
        else:
            open("ready").read()
        """,
    )
    started = _start(command, "-n", "2", "train.py")
    said = _until(started, "  do  ")
    assert "[rankwise] rank 1 still runs, " in said
    assert "after rank 0 exited without an error, and makes no progress" in said
    assert "train.py:6 in close_logger" in said
    assert "rank 1: its script has run to the end, but its process does not exit" in said
    assert "do        release what keeps it alive at the end of the script" in said
    _open(command.folder / "gate")
    assert re.fullmatch(r"\[rankwise\] 2 ranks finished in \d+ s\n", _rest(started))
    assert started.returncode == 0


def test_a_rank_that_works_on_gets_one_line_and_is_reported_when_it_stops_working(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os

        def save():
            open("ready", "w").close()
            while not os.path.exists("saved"):
                sum(range(1000))

        if os.environ["RANK"] == "0":
            save()
            open("gate").read()
        else:
            open("ready").read()
        """,
    )
    started = _start(command, "-n", "2", "train.py")
    said = _until(started, "still works")
    assert "makes no progress" not in said
    assert "[rankwise] rank 0 still works, " in said
    assert "in save\n" in said
    (command.folder / "saved").touch()
    said = _until(started, "  do  ")
    assert "still works" not in said
    assert "[rankwise] rank 0 still runs, " in said
    assert "do        if it waits for a rank that has exited" in said
    _open(command.folder / "gate")
    assert re.fullmatch(r"\[rankwise\] 2 ranks finished in \d+ s\n", _rest(started))
    assert started.returncode == 0


def test_a_rank_that_holds_pythons_lock_after_the_world_is_shown_with_its_stack(command: Command) -> None:
    command.write(
        "train.py",
        """
        import ctypes, os, rankwise as rw

        def destroyed(gate):
            open("ready", "w").close()
            ctypes.PyDLL(None).read(gate, ctypes.create_string_buffer(1), 1)

        with rw.join() as world:
            rw.barrier()
        if world.rank == 1:
            destroyed(os.open("gate", os.O_RDWR))
        else:
            open("ready").read()
        """,
    )
    started = _start(command, "-n", "2", "train.py")
    said = _until(started, "  do  ")
    assert "[rankwise] rank 1 still runs, " in said
    assert "train.py:6 in destroyed" in said
    _open(command.folder / "gate")
    started.terminate()
    _rest(started)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            """
            import os, rankwise as rw
            if os.environ["RANK"] == "0":
                raise SystemExit
            rw.join()
            """,
            "PeerMissing: join() cannot complete: rank 0 has exited without an error and without joining.",
        ),
        (
            """
            import rankwise as rw
            with rw.join() as world:
                pass
            if world.rank == 0:
                raise SystemExit
            rw.join()
            """,
            "PeerMissing: join() cannot complete: rank 0 has exited without an error and without joining.",
        ),
        (
            """
            import os, torch.distributed as dist
            if os.environ["RANK"] == "0":
                raise SystemExit
            dist.init_process_group("gloo")
            """,
            "This wait cannot end: rank 0 exited without an error before it called init_process_group().",
        ),
    ],
)
def test_a_rank_that_ends_before_it_joins_is_an_error_of_those_that_wait(
    command: Command, script: str, expected: str
) -> None:
    command.write("train.py", script)
    ended = command.run("-n", "3", "train.py")
    assert ended.returncode == 1
    assert expected in ended.stderr


def test_a_rank_that_ends_before_its_peers_open_nothing_ends_well(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()  # Gloo fails if a rank leaves while another still connects to it.
        dist.destroy_process_group()
        if os.environ["RANK"] == "0":
            raise SystemExit
        print("worked on")
        """,
    )
    ended = command.run("-n", "2", "train.py")
    assert (ended.returncode, ended.stdout) == (0, "worked on\n"), ended.stderr


def test_a_wait_for_others_to_join_names_the_missing_ranks(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os, rankwise as rw
        if os.environ["RANK"] == "1":
            open("gate").read()
        rw.join()
        """,
    )
    started = _start(command, "-n", "2", "train.py")
    said = _until(started, "join() has been waiting")
    assert "for rank 1: not started, or not yet at rankwise.join()" in said
    _open(command.folder / "gate")
    assert "still runs" not in _rest(started)
    assert started.returncode == 0
