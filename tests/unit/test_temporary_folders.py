# SPDX-License-Identifier: Apache-2.0
"""Temporary folders of rankwise: named, and removed by the next process if theirs was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.world import processes
from rankwise.world.processes import IN_USE, make_temporary_folder, remove_temporary_folder

if TYPE_CHECKING:
    import pytest


def _killed_with_a_folder(parent: Path) -> Path:
    """Have a process make a folder and die; return the folder."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        folder = make_temporary_folder("auto", parent)
        (folder / "large").write_bytes(b"0" * 1000)
        os.write(writer, os.fsencode(folder))
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    os.waitpid(pid, 0)
    folder = Path(os.fsdecode(os.read(reader, 1000)))
    os.close(reader)
    return folder


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    others = [tmp_path / "rankwise-mine", tmp_path / "tmp-of-another-program"]
    for other in others:
        other.mkdir()
    mine = make_temporary_folder("place", tmp_path)
    left = _killed_with_a_folder(tmp_path)
    assert left.name.startswith("rankwise-auto-")
    assert (left / "large").exists()
    again = make_temporary_folder("auto", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([*others, mine, again])
    for folder in (mine, again):
        remove_temporary_folder(folder)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_folder_that_a_fork_uses_is_kept(tmp_path: Path) -> None:
    ready_reader, ready_writer = os.pipe()
    end_reader, end_writer = os.pipe()
    pid = os.fork()
    if not pid:
        folder = make_temporary_folder("", tmp_path)
        os.write(ready_writer, os.fsencode(folder))
        if not os.fork():
            os.close(end_writer)
            os.read(end_reader, 1)
            os.write(ready_writer, b"ended")
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    folder = Path(os.fsdecode(os.read(ready_reader, 1000)))
    remove_temporary_folder(make_temporary_folder("", tmp_path))
    assert list(tmp_path.iterdir()) == [folder]
    os.close(end_writer)
    os.close(ready_writer)
    assert os.read(ready_reader, 5) == b"ended"
    # Until its process has exited, which nobody waits for here, the lock may still be held.
    assert os.read(ready_reader, 1) == b""
    os.close(ready_reader)
    os.close(end_reader)


def test_the_folder_of_another_machine_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_this_machine", lambda: b"another machine")
    left = _killed_with_a_folder(tmp_path)
    monkeypatch.undo()
    remove_temporary_folder(make_temporary_folder("", tmp_path))
    assert list(tmp_path.iterdir()) == [left]


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "rankwise-x").mkdir()
    (tmp_path / "rankwise-x" / IN_USE).symlink_to(tmp_path / "other")
    (tmp_path / "other").write_bytes(processes._this_machine())
    remove_temporary_folder(make_temporary_folder("", tmp_path))
    assert (tmp_path / "rankwise-x").exists()
