# SPDX-License-Identifier: Apache-2.0
"""A rank that fails under ``rankwise run``: what a person reads, what a shell gets, what is started again."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("ending", "exit_code", "text"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("sys.exit(3)", 3, "called sys.exit(3) at train.py:3 in <module>"),
        ("sys.exit('told')", 1, "told"),
        ("os._exit(4)", 4, "exit code 4"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL, exit code 137"),
        ("os.abort()", 134, "killed by SIGABRT"),
        ("ctypes.string_at(0)", 139, "Segmentation fault"),
        ("import bad", 1, "SyntaxError"),
    ],
)
def test_the_exit_code_is_the_failing_ranks(
    command: Command, num_ranks: int, ending: str, exit_code: int, text: str
) -> None:
    command.write("bad.py", "x = = 1")
    command.write(
        "train.py",
        f"import ctypes, os, signal, sys\nprint('before')\n{ending}\n",
    )
    ended = command.run("-n", str(num_ranks), "train.py")
    assert ended.returncode == exit_code
    assert text in ended.stderr
    assert ended.stdout == "before\n" * num_ranks


def test_a_crash_shows_the_line_of_python_it_was_at(command: Command) -> None:
    command.write(
        "train.py",
        """
        import ctypes, rankwise as rw

        def in_an_extension():
            ctypes.string_at(0)

        with rw.join() as world:
            if world.rank == 1:
                in_an_extension()
            rw.barrier()
        """,
    )
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 139
    report = ended.stderr[ended.stderr.index("[rankwise] rank 1 of 2 (") :]
    assert "failed first: killed by SIGSEGV, exit code 139" in report
    assert re.search(r'train.py", line 5, in in_an_extension\n.*\nFatal Python error: Segmentation fault\n$', report)
    assert "fork_server" not in ended.stderr
    assert ended.stderr.count("Fatal Python error") == 1


def test_a_crash_in_a_process_that_a_rank_forked_is_shown_by_itself(command: Command) -> None:
    command.write(
        "train.py",
        """
        import ctypes, os, sys

        child = os.fork()
        if child == 0:
            ctypes.string_at(0)
        sys.exit(os.WTERMSIG(os.waitpid(child, 0)[1]))
        """,
    )
    ended = command.run("-n", "1", "train.py")
    assert ended.returncode == signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in ended.stderr


MISTAKES = {
    "in a call": "rw.DataLoader(list(range(8)), global_batch_size=8.5)",
    "in a sample": "list(rw.DataLoader(Broken(), global_batch_size=4))",
    "in a worker": "list(rw.DataLoader(Broken(), global_batch_size=4, num_workers=1))",
    "in a batch": "list(rw.DataLoader(Ragged(), global_batch_size=4))",
    "on a disk": "rw.save('/proc/x', model=rw.replicate(torch.nn.Linear(1, 1)))",
    "in a weight": "rw.replicate(torch.nn.Linear(1, 1), weight=lambda x, y: 1)(torch.ones(4, 1))",
    "in a recursion": "even(1)",
    "of a rank that another waits for at its end": "rw.send(torch.ones(2), 0)",
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("num_ranks", [0, 2])
def test_no_mistake_takes_more_than_twelve_lines(command: Command, mistake: str, num_ranks: int) -> None:
    command.write(
        "train.py",
        f"""
        import torch, rankwise as rw

        class Broken(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                raise ValueError("bad sample")

        class Ragged(Broken):
            def __getitem__(self, index):
                return torch.zeros(index)

        def even(number):
            return odd(number)

        def odd(number):
            return even(number)

        world = rw.join()
        {MISTAKES[mistake]}
        """,
    )
    ended = command.run("-n", str(num_ranks), "train.py") if num_ranks else command.python("train.py")
    assert ended.returncode == 1
    assert "train.py" in ended.stderr
    assert "fork_server" not in ended.stderr
    report = re.split(r"(?=\[rankwise\] (?:all|rank) |Traceback)", ended.stderr, maxsplit=1)[1]
    # The frames of the process that the test has python forked from.
    report = re.sub(r'  File ".*/tests/warm\.py", .*\n(    .*\n)*', "", report)
    assert len(report.splitlines()) <= 12, report


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_every_frame_is_shown_on_request(command: Command, num_ranks: int) -> None:
    command.write("train.py", f"import rankwise as rw\n\nrw.join()\n{MISTAKES['in a call']}\n")
    full = {"RANKWISE_TRACEBACK": "full"}
    run = command.run("-n", "2", "train.py", env=full) if num_ranks else command.python("train.py", env=full)
    assert "src/rankwise/data/loader.py" in run.stderr
    assert "hidden" not in run.stderr


def test_a_rank_that_fails_at_its_end_is_reported_as_one_that_failed_in_the_script(command: Command) -> None:
    command.write("train.py", "import torch, rankwise as rw\nworld = rw.join()\nrw.send(torch.ones(2), 0)\n")
    ended = command.run("-n", "2", "train.py")
    assert "[rankwise] rank 1 then also failed: PeerFailed: Rank 0 failed: ConfigurationError.\n" in ended.stderr
    assert ended.stderr.count("Traceback") == 1


def test_the_hook_that_a_script_has_set_shows_its_errors(command: Command) -> None:
    command.write(
        "train.py",
        """
        import sys, rankwise as rw

        sys.excepthook = lambda kind, error, trace: print("seen:", kind.__name__)
        rw.join()
        raise ValueError("boom")
        """,
    )
    ended = command.python("train.py")
    assert (ended.returncode, ended.stdout) == (1, "seen: ValueError\n")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("line", ["breakpoint()", "input('name? ')"])
def test_reading_from_the_terminal_is_an_error_without_one(command: Command, line: str) -> None:
    command.write("train.py", f"{line}\nprint('after')\n")
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 1
    assert "stdin is empty if there are several ranks: debug with `rankwise run -n 1`" in ended.stderr.splitlines()[-1]


def test_a_script_for_one_device_gets_no_advice_for_several_ranks(command: Command) -> None:
    command.write("train.py", "input('name? ')\n")
    ended = command.run("-n", "2", "--auto", "train.py")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "EOFError: EOF when reading a line"


def test_ranks_that_are_ended_for_a_restart_are_not_said_to_hang(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os, signal

        if os.environ["RANKWISE_ATTEMPT"] == "0":
            if os.environ["RANK"] == "1":
                raise ValueError("boom")
            signal.pause()
        """,
    )
    ended = command.run("-n", "3", "--max-restarts", "1", "train.py")
    assert ended.returncode == 0
    assert "[rankwise] ranks 0, 2 terminated by the launcher for a restart\n" in ended.stderr
    assert "had to be killed" not in ended.stderr


def test_the_first_failure_is_shown_last_and_whole(command: Command) -> None:
    path = command.write(
        "train.py",
        """
        import os, torch, torch.distributed as dist

        def step():
            if dist.get_rank() == 1:
                raise ValueError("bad sample 17\\nsecond line")
            dist.all_reduce(torch.ones(1))

        dist.init_process_group("gloo")
        step()
        """,
    )
    ended = command.run("-n", "3", "train.py")
    assert ended.returncode == 1
    name = os.uname().nodename
    expected = (
        "[rankwise] the error of rank 1:\n"
        "Traceback (most recent call last):\n"
        f'  File "{path}", line 10, in <module>\n'
        "    step()\n"
        f'  File "{path}", line 6, in step\n'
        '    raise ValueError("bad sample 17\\nsecond line")\n'
        "ValueError: bad sample 17\nsecond line\n"
    )
    # Python 3.13 marks the part of a line that it is at.
    said = "".join(line for line in ended.stderr.splitlines(keepends=True) if line.strip(" ~^\n"))
    assert said.endswith(expected), ended.stderr
    assert ended.stderr.count("Traceback") == 1
    others = ended.stderr.partition(
        f"[rankwise] rank 1 of 3 ({name}) failed first: ValueError: bad sample 17, at train.py:6\n"
    )[2]
    for rank in (0, 2):
        assert re.search(
            rf"^\[rankwise\] ranks? .*{rank}.* then also failed: RuntimeError: .*\bpeer\b", others, re.MULTILINE
        )


def test_a_signal_is_shown_with_the_ranks_last_lines(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os, signal, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            print("allocating", file=sys.stderr)
            os.write(2, b"no newline")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
        """,
    )
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 137
    assert ended.stderr.endswith("[rankwise] the last lines rank 1 wrote to stderr:\n  allocating\n  no newline\n")
    assert re.search(r"rank 1 of 2 \(.*\) failed first: killed by SIGKILL, exit code 137", ended.stderr)


def test_after_a_kill_the_report_shows_where_that_rank_was(command: Command) -> None:
    path = command.write(
        "train.py",
        """
        import os, signal, rankwise as rw

        def train(world):
            rw.barrier()
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if world.rank == 2:
                open("ready", "w").close()
                open("never").read()
            open("ready").read()
            rw.barrier()

        with rw.join() as world:
            train(world)
        """,
    )
    for name in ("ready", "never"):
        os.mkfifo(command.folder / name)
    ended = command.run("-n", "3", "train.py")
    assert ended.returncode == 137
    report = ended.stderr[ended.stderr.index("[rankwise] rank 1 of 3 (") :]
    first, seen, *others = report.splitlines()
    assert "failed first: killed by SIGKILL, exit code 137" in first
    assert seen.startswith("[rankwise] it was last seen in or after barrier() at train.py:5 in train, started ")
    assert "[rankwise] rank 0 then also failed: PeerFailed: Rank 1 failed: SIGKILL." in others
    assert f"[rankwise] rank 2 had to be terminated by the launcher, at {path}:10 in train" in others


def test_a_rank_that_ends_early_and_well_is_no_failure(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os, select
        if os.environ["RANK"] == "1":
            raise SystemExit
        select.select([], [], [], 0.5)
        print("done")
        """,
    )
    ended = command.run("-n", "2", "train.py")
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_a_rank_that_cannot_end_does_not_keep_the_others(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os, threading
        if os.environ["RANK"] == "1":
            threading.Thread(target=threading.Event().wait).start()
            raise ValueError("first")
        threading.Event().wait()
        """,
    )
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: first\n"), ended.stderr


def test_a_process_the_script_forks_is_not_the_rank(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os
        pid = os.fork()
        if pid == 0:
            raise ValueError("in the child")
        print(os.waitpid(pid, 0)[1] >> 8)
        """,
    )
    ended = command.run("-n", "2", "train.py")
    assert (ended.returncode, ended.stdout) == (0, "1\n1\n"), ended.stderr
    assert ended.stderr.count("ValueError: in the child") == 2


def test_a_restart_shares_nothing_with_the_attempt_before(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os, torch, torch.distributed as dist
        attempt, rank = os.environ["RANKWISE_ATTEMPT"], os.environ["RANK"]
        print(os.getppid(), flush=True)
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        seen = store.check(["rank-0"])
        store.set(f"rank-{rank}", "here")
        total = torch.ones(1)
        dist.all_reduce(total)
        if attempt == "0" and rank == "1":
            raise ValueError("only once")
        dist.all_reduce(total)
        print("attempt", attempt, total.item(), seen if rank == "0" else False)
        dist.destroy_process_group()
        """,
    )
    ended = command.run("-n", "2", "--max-restarts", "2", "train.py")
    lines = ended.stdout.splitlines()
    parents = [line for line in lines if line.isdecimal()]
    assert (ended.returncode, sorted(set(lines) - set(parents))) == (0, ["attempt 1 4.0 False"]), ended.stderr
    # All ranks are forks of the one process that holds the imports.
    assert (len(lines), len(parents), len(set(parents))) == (6, 4, 1)
    assert "ValueError: only once\n[rankwise] restart 1 of 2\n[rankwise] 2 ranks finished in " in ended.stderr


def test_restarts_are_limited(command: Command) -> None:
    command.write("train.py", "import os, sys; print(os.environ['RANKWISE_ATTEMPT']); sys.exit(6)")
    ended = command.run("--max-restarts", "2", "train.py")
    assert (ended.returncode, ended.stdout) == (6, "0\n1\n2\n")


@pytest.mark.parametrize("ending", ["with rw.join() as world:", "world = rw.join()\nif world:"])
def test_an_error_on_a_short_batch_says_how_many_samples_the_rank_had(command: Command, ending: str) -> None:
    command.write(
        "train.py",
        f"""import rankwise as rw, torch
{ending}
    for batch in rw.DataLoader(torch.ones(5), global_batch_size=4):
        print(batch.max())
        rw.barrier()
""",
    )
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 1
    report = ended.stderr[ended.stderr.index("[rankwise] rank 1 of 2 (") :]
    assert report.count("the last batch that this rank got from its DataLoader held 0 samples.") == 1


def test_a_wrong_argument_says_what_to_write_with_the_launcher_and_without(command: Command) -> None:
    command.write("train.py", "import rankwise as rw\nrw.join(device='cpu')\nrw.mesh(dp=1)\n")
    fix = "  do        did you mean dp_shard or dp_replicate? The call is rw.mesh(worker_groups=..., dp_replicate=..., "
    for done in (command.run("-n", "2", "train.py"), command.python("train.py")):
        assert done.returncode == 1
        assert "\nTypeError: mesh() got an unexpected keyword argument 'dp'\n" + fix in done.stderr
        assert len(done.stderr.splitlines()) <= 12
