# SPDX-License-Identifier: Apache-2.0
"""``rankwise horovodrun`` with what is no Python script: shell commands, and options for Python itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess

    from conftest import Command

ADD = """
    import sys, torch
    import horovod.torch as hvd
    hvd.init()
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="total").item()
    print(hvd.rank(), total, sys.flags.optimize, sys.warnoptions, sys.argv, flush=True)
    if "--fail" in sys.argv and hvd.rank() == 1:
        raise ValueError("of rank 1")
    hvd.barrier()
"""


def horovodrun(command: Command, *words: str) -> subprocess.CompletedProcess[str]:
    return command.rankwise("horovodrun", "-np", "2", *words)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["bash", "-c", "exec python add.py $((RANK + 5))"], "0 [] ['add.py', '{number}']"),
        (["python", "-O", "-W", "error::FutureWarning", "add.py"], "1 ['error::FutureWarning'] ['add.py']"),
        (["python", "-c", "import runpy; runpy.run_path('add.py')", "x"], "0 [] ['add.py', 'x']"),
        (["python", "-Im", "add"], None),
    ],
    ids=["a shell", "options", "a program in the command", "isolated"],
)
def test_ranks_of_any_command_train_together(command: Command, words: list[str], facts: str | None) -> None:
    command.write("add.py", ADD)
    ended = horovodrun(command, *words)
    if facts is None:
        assert ended.returncode == 1
        assert "No module named add" in ended.stderr, "Python got its option as it was written"
        return
    assert ended.returncode == 0, ended.stderr
    expected = [f"{rank} 2.0 {facts.format(number=rank + 5)}" for rank in range(2)]
    assert sorted(ended.stdout.splitlines()) == expected
    assert "-m rankwise.compat.horovod --no-python" in ended.stderr


def test_the_exit_code_is_the_commands(command: Command) -> None:
    ended = horovodrun(command, "sh", "-c", "[ $RANK = 0 ] || exit 7")
    assert ended.returncode == 7, ended.stderr
    assert "rank 1 of 2 (" in ended.stderr


def test_an_exception_below_options_of_python_is_shown(command: Command) -> None:
    command.write("add.py", ADD)
    ended = horovodrun(command, "python", "-W", "error", "add.py", "--fail")
    assert ended.returncode == 1
    report = ended.stderr.partition("failed first")
    assert report[0].rstrip().endswith(f"rank 1 of 2 ({os.uname().nodename})")
    assert "ValueError: of rank 1" in report[2]


# An exit handler holds rank 1 until rank 0 has ended: the echo ends before its cause.
SLOW_TO_END = """
    import atexit, os, select
    import horovod.torch as hvd
    hvd.init()
    pid = hvd.broadcast_object(os.getpid(), root_rank=0)
    if hvd.rank() == 1:
        other = os.pidfd_open(pid)
        atexit.register(select.select, [other], [], [])
        raise ValueError("of rank 1")
    hvd.barrier()
"""


def test_a_rank_that_only_receives_a_failure_is_not_blamed_if_it_ends_first(command: Command) -> None:
    command.write("train.py", SLOW_TO_END)
    ended = horovodrun(command, "python", "-W", "error", "train.py")
    report = ended.stderr.partition("failed first")
    assert report[0].rstrip().endswith(f"rank 1 of 2 ({os.uname().nodename})"), ended.stderr
    assert "ValueError: of rank 1" in ended.stderr


def test_a_pipe_of_the_command_ends_as_in_a_shell(command: Command) -> None:
    ended = horovodrun(command, "sh", "-c", "yes | head -n 1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "y\ny\n"
    assert "Broken pipe" not in ended.stderr


def test_a_file_that_cannot_be_run_has_its_own_error(command: Command) -> None:
    command.write("train.sh", "\x7fELF is not what this is").chmod(0o755)
    ended = horovodrun(command, "./train.sh")
    assert ended.returncode == 1
    assert "The command './train.sh' cannot be run: Exec format error." in ended.stderr
