# SPDX-License-Identifier: Apache-2.0
"""The collective that a rank has begun last, as it is found after its process."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from rankwise.health import flight_recorder
from rankwise.health.flight_recorder import LENGTH_BYTES, MOST_NOTED, FlightRecorder, LastCollective

if TYPE_CHECKING:
    from pathlib import Path


def test_the_last_call_of_a_killed_process_is_found(tmp_path: Path) -> None:
    path = str(tmp_path / "stack.last")
    script = (
        "import os, sys\n"
        "from rankwise.health.flight_recorder import FlightRecorder\n"
        "from rankwise.health.flight_recorder import LastCollective\n"
        "recorder = FlightRecorder(LastCollective(sys.argv[1]))\n"
        "recorder.begin('a collective with a longer name')\n"
        "recorder.begin('all_reduce')\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, path], check=False).returncode == -9
    found = flight_recorder.read_last_collective(path, time.time())
    assert re.fullmatch(r"in or after all_reduce at <string>:6 in <module>, started \d+\.\d s before it exited", found)


def test_nothing_is_found_where_nothing_was_noted(tmp_path: Path) -> None:
    assert flight_recorder.read_last_collective(str(tmp_path / "absent"), 0.0) == ""
    (tmp_path / "short").write_bytes(b"abc")
    assert flight_recorder.read_last_collective(str(tmp_path / "short"), 0.0) == ""
    LastCollective(str(tmp_path / "empty"))
    assert flight_recorder.read_last_collective(str(tmp_path / "empty"), 0.0) == ""


def test_a_rank_trains_without_a_file_of_its_last_call(tmp_path: Path) -> None:
    assert flight_recorder.open_last_collective("") is None
    assert flight_recorder.open_last_collective(str(tmp_path / "no folder" / "file")) is None
    assert flight_recorder.open_last_collective("/dev/full") is None
    FlightRecorder(None).begin("barrier()")


def test_words_of_any_length_and_number_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "stack.last"
    recorder = FlightRecorder(LastCollective(str(path)))
    for number in range(MOST_NOTED + 2):
        recorder.begin(f"gather {number} " + "x" * 3 * LENGTH_BYTES)
    found = flight_recorder.read_last_collective(str(path), time.time())
    assert found.startswith(f"in or after gather {MOST_NOTED + 1} x")
    assert path.stat().st_size == LENGTH_BYTES
