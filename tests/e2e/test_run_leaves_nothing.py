# SPDX-License-Identifier: Apache-2.0
"""However ``rankwise run`` is ended, nothing it started is there 5 s later."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import Command
    from tests.warm import Started

PROGRAMS = {
    "waiting": "",
    "stubborn": """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    """,
    "stopped": "",
    "in a collective": """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            print("ready", os.getpid(), flush=True)
            dist.all_reduce(torch.ones(1))
    """,
    "with loader workers": """
        from torch.utils.data import DataLoader
        batches = iter(DataLoader(range(1000), num_workers=2, persistent_workers=True))
        next(batches)
    """,
    "with programs of its own": """
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        subprocess.Popen([sys.executable, "-c",
            "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(1000)"]).wait()
    """,
    "with a forkserver": """
        import multiprocessing
        if __name__ == "__main__":
            context = multiprocessing.get_context("forkserver")
            context.Process(target=signal.pause).start()
    """,
}
FRAME = """
import os, signal, subprocess, sys, threading
{}
if __name__ == "__main__":
    print("ready", os.getpid(), flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files of a job. Its path is short: sockets lie in it, whose names have 107 bytes at most.

    Those of pytest are longer with the number of a worker.
    """
    with tempfile.TemporaryDirectory(prefix="left-") as folder:
        yield Path(folder)


def _start(command: Command, kind: str, temporary: Path) -> Started:
    command.write("train.py", FRAME.format(textwrap.dedent(PROGRAMS[kind])))
    started = command.start("-n", "2", "train.py", env={"TMPDIR": str(temporary)})
    assert started.stdout is not None
    pids = [int(started.stdout.readline().split()[1]) for _ in range(2)]
    if kind == "stopped":
        os.kill(pids[1], signal.SIGSTOP)
    return started


def _server_of(command: Command, started: Started) -> int:
    return next(pid for pid in command.processes() if _parent(pid) == started.pid)


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left(command: Command, kind: str, number: signal.Signals, temporary: Path) -> None:
    started = _start(command, kind, temporary)
    pids = command.processes()
    assert len(pids) >= 4
    os.kill(started.pid, number)
    assert command.wait_until_gone([pid for pid in pids if pid != started.pid], 5.0) in (
        [],
        [started.pid],
    )
    _, text = started.communicate()
    assert started.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in text
    if number != signal.SIGKILL:
        assert text.endswith(f"[rankwise] {number.name}: every rank has been terminated\n")
    assert list(temporary.iterdir()) == []


def test_ctrl_c_lets_ranks_clean_up(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os, threading
        try:
            # An interrupt may follow at once.
            print("ready", flush=True)
            threading.Event().wait()
        finally:
            print("cleaned", os.environ["RANK"], flush=True)
        """,
    )
    started = command.start("-n", "2", "train.py")
    assert started.stdout is not None
    assert [started.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    os.kill(started.pid, signal.SIGINT)
    text, _ = started.communicate()
    assert sorted(text.splitlines()) == ["cleaned 0", "cleaned 1"]
    assert started.returncode == 130


def test_a_second_signal_ends_stubborn_ranks_too(command: Command, temporary: Path) -> None:
    started = _start(command, "stubborn", temporary)
    os.kill(started.pid, signal.SIGINT)
    os.kill(started.pid, signal.SIGTERM)
    _, text = started.communicate()
    assert "Traceback" not in text
    assert text.endswith(": every rank has been terminated\n")
    assert started.returncode in {130, 143}


def test_a_signal_before_the_ranks_are_there(command: Command) -> None:
    command.write("train.py", "")
    command.write(
        "rankwise_slow/torch/__init__.py",
        "print('importing', flush=True)\nimport time\ntime.sleep(60)\n",
    )
    environment = command.environment(
        PYTHONPATH=f"{command.folder}/rankwise_slow:{command.environment()['PYTHONPATH']}"
    )
    started = subprocess.Popen(
        command.words("train.py"),
        cwd=command.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "importing\n"
    os.kill(started.pid, signal.SIGINT)
    assert started.communicate() == ("", "")
    assert started.returncode == 130


@pytest.mark.parametrize("kind", PROGRAMS)
def test_nothing_is_left_when_the_fork_server_is_killed(command: Command, kind: str, temporary: Path) -> None:
    started = _start(command, kind, temporary)
    os.kill(_server_of(command, started), signal.SIGKILL)
    _, text = started.communicate()
    assert "LaunchError: The process that starts the ranks was killed" in text
    assert started.returncode == 2
    assert command.processes() == []
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("kind", ["waiting", "stubborn", "with programs of its own"])
def test_ctrl_c_ends_a_job_whose_warm_server_is_stopped(command: Command, kind: str, temporary: Path) -> None:
    started = _start(command, kind, temporary)
    os.kill(_server_of(command, started), signal.SIGSTOP)
    os.kill(started.pid, signal.SIGINT)
    _, text = started.communicate()
    assert text.endswith("[rankwise] SIGINT: every rank has been terminated\n")
    assert started.returncode == 130
    assert command.processes() == []
    assert list(temporary.iterdir()) == []


def test_the_sockets_of_multiprocessing_lie_in_the_jobs_folder_and_a_scripts_own_files_do_not(
    command: Command, temporary: Path
) -> None:
    command.write(
        "train.py",
        """
        import multiprocessing, os, tempfile
        from multiprocessing.connection import Listener

        def tell(queue):
            queue.put(os.path.dirname(Listener(None, "AF_UNIX").address))

        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                child = context.Process(target=tell, args=(queue,))
                child.start()
                print(queue.get() == os.path.dirname(os.environ["RANKWISE_ERROR_FILE"]))
                child.join()
            print(tempfile.gettempdir() == os.environ["TMPDIR"])
        """,
    )
    ran = command.run("-n", "1", "train.py", env={"TMPDIR": str(temporary)})
    assert (ran.returncode, ran.stdout) == (0, "True\n" * 4), ran.stderr
    assert list(temporary.iterdir()) == []


def test_a_finished_run_leaves_no_temporary_files(command: Command, temporary: Path) -> None:
    command.write("train.py", "raise ValueError")
    ended = command.run("-n", "2", "train.py", env={"TMPDIR": str(temporary)})
    assert ended.returncode == 1
    assert list(temporary.iterdir()) == []


def test_processes_that_a_rank_left_running_end_with_the_run(command: Command) -> None:
    command.write("train.py", "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)")
    assert command.run("-n", "2", "train.py").returncode == 0
    assert command.processes() == []


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
