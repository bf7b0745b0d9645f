# SPDX-License-Identifier: Apache-2.0
"""What is seen of a process from outside."""

from __future__ import annotations

import faulthandler
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rankwise.health.process_probe import is_there, lines_of_dump, stack_of, start_time_of, state_of


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
    with subprocess.Popen(
        [sys.executable, "-c", OFFERS, str(own)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "offered\n"
        assert stack_of(process.pid, str(others)) == []
        assert own.read_text() == f"{process.pid}\n"
        assert stack_of(process.pid, str(own))[-1].endswith("in <module>")
        process.kill()
