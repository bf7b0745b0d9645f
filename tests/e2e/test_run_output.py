# SPDX-License-Identifier: Apache-2.0
"""What ranks write under ``rankwise run``, and who reads it."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.conftest import Command


def test_lines_are_whole_and_stderr_has_the_rank(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os, sys
        rank = os.environ["RANK"]
        for i in range(3000):
            print(rank * 300)
            print(rank * 30, file=sys.stderr)
        os.write(1, b"last " + rank.encode())
        os._exit(0)
        """,
    )
    ended = command.run("-n", "3", "train.py")
    assert ended.returncode == 0
    lines = ended.stdout.splitlines()
    for rank in "012":
        assert lines.count(rank * 300) == 3000
        assert lines.count(f"last {rank}") == 1
        assert ended.stderr.splitlines().count(f"[rank {rank}/3] {rank * 30}") == 3000
    assert len(lines) == 9003


def test_with_one_rank_the_streams_are_untouched(command: Command) -> None:
    command.write("train.py", "import sys; print(sys.stdin.read()); sys.stderr.write('\\r 10%\\r 20%')")
    ended = command.python("-m", "rankwise", "run", "train.py", text="typed")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "typed\n"
    assert ended.stderr.endswith("\n\r 10%\r 20%")


def test_one_rank_writes_what_python_writes(command: Command) -> None:
    command.write("nothing.py", "")
    ended = command.run("-n", "1", "nothing.py")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_imports_of_torch_during_training_are_not_reported_as_leaked(command: Command) -> None:
    command.write(
        "train.py",
        """
        import torch
        torch.distributed.init_process_group("gloo")
        model = torch.nn.Linear(2, 2)
        model(torch.ones(3, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        import torch._dynamo  # what the step imports, and with it triton where torch has it
        torch.distributed.barrier()  # a rank that ends at once breaks the connection that the other one is opening
        torch.distributed.destroy_process_group()
        """,
    )
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 0
    assert [line for line in ended.stderr.splitlines() if "rankwise] 2 ranks " not in line] == []


def test_rank_zero_writes_to_a_terminal_itself(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os, sys
        with open("tty-" + os.environ["RANK"], "w") as file:
            file.write(repr((sys.stdout.isatty(), sys.stderr.isatty())))
        """,
    )
    ours, theirs = pty.openpty()
    subprocess.run(
        command.words("-n", "2", "train.py"),
        cwd=command.folder,
        env=command.environment(),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        check=True,
    )
    os.close(ours)
    os.close(theirs)
    assert [(command.folder / f"tty-{rank}").read_text() for rank in (0, 1)] == [
        "(True, True)",
        "(False, False)",
    ]


def test_log_files_hold_everything_and_the_terminal_rank_zero(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os, sys
        print("out", os.environ["RANK"])
        print("err", os.environ["RANK"], file=sys.stderr)
        if os.environ["RANK"] == "1":
            raise ValueError("boom")
        """,
    )
    ended = command.run("-n", "2", "--log-dir", "deep/logs", "train.py")
    logs = command.folder / "deep" / "logs"
    assert ended.stdout == "out 0\n"
    assert "err 0\n" in ended.stderr
    assert "err 1" not in ended.stderr
    assert (logs / "rank-0.out").read_text() == "out 0\n"
    assert (logs / "rank-1.out").read_text() == "out 1\n"
    assert (logs / "rank-0.err").read_text() == "err 0\n"
    assert (logs / "rank-1.err").read_text().startswith("err 1\nTraceback")
    assert "its stderr is in deep/logs/rank-1.err" in ended.stderr


def test_a_reader_that_leaves_ends_the_ranks_as_it_would_one_program(command: Command) -> None:
    command.write("train.py", "while True:\n    print('x' * 100)\n")
    started = command.start("-n", "2", "train.py")
    assert started.stdout is not None
    assert started.stderr is not None
    assert started.stdout.readline() == "x" * 100 + "\n"
    started.stdout.close()
    text = started.stderr.read()
    started.stderr.close()
    # Python's own exit code where the last flush of stdout fails.
    assert started.wait() == 120
    assert text.endswith("BrokenPipeError: [Errno 32] Broken pipe\n"), text


TRAIN_AND_PRINT = """
import os
for i in range(3000):
    os.write(1, b"x" * 300 + b"\\n")
open("trained-" + os.environ["RANK"], "w").close()
"""


def _run_into(command: Command, file: str, *words: str) -> tuple[int, str]:
    """Run as ``rankwise run ... > file``; return the exit code and stderr."""
    with (command.folder / file).open("w") as opened:
        started = command.start_python("-m", "rankwise", "run", *words, stdout=opened)
    with started:
        told = started.communicate(timeout=80)[1]
    return started.wait(), told


def test_a_full_disk_behind_stdout_is_named_and_not_called_a_broken_pipe_only(command: Command) -> None:
    command.write("train.py", TRAIN_AND_PRINT)
    exit_code, told = _run_into(command, "/dev/full", "-n", "2", "train.py")
    assert exit_code == 1
    assert "[rankwise] /dev/full: No space left on device; from now on writes of the ranks fail" in told
    assert "could not write its output: /dev/full: No space left on device\n" in told


def test_a_full_disk_behind_stdout_ends_no_rank_that_has_log_files(command: Command) -> None:
    command.write("train.py", TRAIN_AND_PRINT)
    exit_code, told = _run_into(command, "/dev/full", "-n", "2", "--log-dir", "logs", "train.py")
    assert exit_code == 0, told
    assert told.count("[rankwise] /dev/full: No space left on device; the ranks continue") == 1
    for rank in (0, 1):
        assert (command.folder / f"trained-{rank}").exists()
        assert (command.folder / "logs" / f"rank-{rank}.out").stat().st_size == 3000 * 301


def test_closed_streams_are_nowhere_and_not_other_files(command: Command) -> None:
    command.write("train.py", "import os, sys; print('said'); os.fstat(0); sys.exit(3)")
    words = " ".join(map(shlex.quote, command.words("-n", "2", "train.py")))
    for closed in ("<&-", ">&-", "2>&-"):
        ended = subprocess.run(
            ["sh", "-c", f"{words} {closed}"], cwd=command.folder, env=command.environment(), check=False, timeout=80
        )
        assert ended.returncode == 3, closed


LOSSES = """
import os
rank = int(os.environ["RANK"])
for epoch in range(3):
    print(f"epoch {epoch}: loss {LOSS:.4f}, 0.50 s", flush=True)
"""
HINT = "ranks print different losses: "


def test_losses_of_each_ranks_own_samples_are_named_once(command: Command) -> None:
    command.write("train.py", LOSSES.replace("LOSS", "0.5 + rank"))
    ended = command.run("-n", "3", "train.py")
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if HINT in line]
    assert line.startswith("[rankwise] ")
    assert "'epoch 0: loss " in line
    assert "rankwise.print(rankwise.mean(loss, len(x)))" in line
    assert len(ended.stdout.splitlines()) == 9


def test_a_loss_that_is_the_same_on_every_rank_is_not_named(command: Command) -> None:
    command.write("train.py", LOSSES.replace("LOSS", "0.5"))
    ended = command.run("-n", "3", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert HINT not in ended.stderr
