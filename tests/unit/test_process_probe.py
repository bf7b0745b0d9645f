# SPDX-License-Identifier: Apache-2.0
"""What is seen of a process from outside."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.health import process_probe
from rankwise.health.process_probe import is_there, lines_of_dump, stack_of, start_time_of, state_of

if TYPE_CHECKING:
    from collections.abc import Generator

    import pytest


def test_a_process_that_has_ended_counts_as_exited_before_it_is_waited_for() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        started = start_time_of(process.pid)
        assert is_there(process.pid, started)
        assert not is_there(process.pid, "0"), "another process of that number"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert start_time_of(process.pid) == started, "it is still listed"
        assert not is_there(process.pid, started)


def test_a_process_name_with_brackets_is_not_mistaken_for_a_state(tmp_path: Path) -> None:
    program = tmp_path / "a) Z (b"
    shutil.copy(str(shutil.which("cat")), program)
    with subprocess.Popen([program], stdin=subprocess.PIPE) as process:
        assert is_there(process.pid, start_time_of(process.pid))
        assert state_of(process.pid, "it runs") == f"it runs (process {process.pid})"


def test_the_innermost_frame_is_the_last(tmp_path: Path) -> None:
    dump = tmp_path / "dump"

    def inner() -> None:
        with dump.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    inner()
    *_, outer, innermost = lines_of_dump(dump.read_text())
    assert innermost.endswith(" in inner")
    assert f"{Path(__file__).name}:" in outer


@contextmanager
def _started(script: str, own: Path) -> Generator[subprocess.Popen[str]]:
    """Start a process that offers its stack in the file ``own``; kill it in the end."""
    with subprocess.Popen(
        [sys.executable, "-c", script, str(own)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "offered\n"
            yield process
        finally:
            process.kill()


OFFERS = """
import sys
from rankwise.health.process_probe import offer_stack
offer_stack(sys.argv[1])
print("offered", flush=True)
sys.stdin.read()
"""


def test_a_stack_is_asked_for_only_of_the_process_that_offers_it(tmp_path: Path) -> None:
    own, others = tmp_path / "own", tmp_path / "others"
    others.write_text("1\n")
    with _started(OFFERS, own) as process:
        assert stack_of(process.pid, str(others)) == []
        assert own.read_text() == f"{process.pid}\n"
        assert stack_of(process.pid, str(own))[-1].endswith("in <module>")


BUSY = """
import signal, sys
from rankwise.health.process_probe import STACK_SIGNAL, offer_stack
offer_stack(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, [STACK_SIGNAL])
print("offered", flush=True)
while STACK_SIGNAL not in signal.sigpending():
    pass
sum(range(10**7))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL])
sys.stdin.read()
"""


def test_a_process_that_waits_for_a_core_is_given_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    monkeypatch.setattr(process_probe, "DUMP_SECONDS", 0.0)
    monkeypatch.setattr(process_probe, "CORE_SECONDS", 80.0)
    with _started(BUSY, own) as process:
        assert any(line.endswith("in <module>") for line in stack_of(process.pid, str(own)))


MANY_THREADS = """
import sys, threading
from rankwise.health.process_probe import offer_stack

def deep(depth):
    deep(depth - 1) if depth else threading.Event().wait()

offer_stack(sys.argv[1])
for _ in range(60):
    threading.Thread(target=deep, args=(90,), daemon=True).start()
print("offered", flush=True)
sys.stdin.read()
"""


def test_a_stack_that_is_still_being_written_is_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process loses its core in mid-dump, for as many looks as a stack that has settled would get."""
    own = tmp_path / "own"
    looks = 0

    def look_again(seconds: float) -> None:
        nonlocal looks
        if own.stat().st_size > size:
            looks += 1
            if looks in {1, 40}:
                os.kill(process.pid, signal.SIGSTOP if looks == 1 else signal.SIGCONT)
        sleep(seconds)

    sleep = time.sleep
    with _started(MANY_THREADS, own) as process:
        size = own.stat().st_size
        monkeypatch.setattr(process_probe, "DUMP_SECONDS", 80.0)
        monkeypatch.setattr(time, "sleep", look_again)
        assert stack_of(process.pid, str(own))[-1].endswith("in <module>")
