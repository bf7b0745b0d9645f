# SPDX-License-Identifier: Apache-2.0
"""The collective that a rank has begun last, as it is found after its process."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

from rankwise import last_call
from rankwise.last_call import LENGTH_BYTES, LastCall
from rankwise.record import MOST_NOTED, Record

if TYPE_CHECKING:
    from pathlib import Path


def test_what_a_killed_process_had_begun_last_is_found(tmp_path: Path) -> None:
    path = str(tmp_path / "stack.last")
    script = (
        "import os, sys; from rankwise.record import Record; from rankwise.last_call import LastCall\n"
        "record = Record(LastCall(sys.argv[1]))\n"
        "record.begin('a collective with a longer name')\n"
        "record.begin('all_reduce')\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, path], check=False).returncode == -9
    found = last_call.read(path, time.time())
    assert found.startswith("in or after all_reduce at ")
    assert found.endswith(" s before its end")


def test_nothing_is_found_where_nothing_was_noted(tmp_path: Path) -> None:
    assert last_call.read(str(tmp_path / "absent"), 0.0) == ""
    (tmp_path / "short").write_bytes(b"abc")
    assert last_call.read(str(tmp_path / "short"), 0.0) == ""
    LastCall(str(tmp_path / "empty"))
    assert last_call.read(str(tmp_path / "empty"), 0.0) == ""


def test_a_rank_trains_without_where_there_is_no_file(tmp_path: Path) -> None:
    assert last_call.opened("") is None
    assert last_call.opened(str(tmp_path / "no folder" / "file")) is None
    assert last_call.opened("/dev/full") is None
    Record(None).begin("barrier()")


def test_words_of_any_length_and_number_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "stack.last"
    record = Record(LastCall(str(path)))
    for number in range(MOST_NOTED + 2):
        record.begin(f"gather {number} " + "x" * 3 * LENGTH_BYTES)
    found = last_call.read(str(path), time.time())
    assert found.startswith(f"in or after gather {MOST_NOTED + 1} x")
    assert path.stat().st_size == LENGTH_BYTES
