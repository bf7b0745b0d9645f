# SPDX-License-Identifier: Apache-2.0
"""``rankwise run`` where the disk of its output fills up: a real small file system, in a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rankwise

DISK_BYTES = 1 << 18
TRAIN = """
import os
for i in range(3000):
    os.write(1, b"x" * 300 + b"\\n")
open("trained-" + os.environ["RANK"], "w").close()
"""
MOUNT = f"mount -t tmpfs -o size={DISK_BYTES} tmpfs disk && "


def _run(folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    """Run ``rankwise run`` with these words of a shell, and a small disk under ``disk``; it goes with the namespace."""
    (folder / "disk").mkdir()
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{MOUNT} {sys.executable} -m rankwise run -n 2 {words}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(rankwise.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=80,
    )


def _trained(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("trained-*"))


def test_a_disk_that_fills_up_behind_stdout_is_named(tmp_path: Path) -> None:
    ended = _run(tmp_path, "train.py > disk/train.log")
    assert ended.returncode == 1, ended.stderr
    full = f"{tmp_path}/disk/train.log: No space left on device"
    assert f"[rankwise] {full}; from now on writes of the ranks fail with a broken pipe" in ended.stderr
    assert f"could not write its output: {full}\n" in ended.stderr
    assert _trained(tmp_path) == []


def test_ranks_with_log_files_continue_when_the_disk_of_stdout_is_full(tmp_path: Path) -> None:
    ended = _run(tmp_path, "--log-dir logs train.py > disk/train.log")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("disk/train.log: No space left on device; the ranks continue") == 1
    assert _trained(tmp_path) == ["trained-0", "trained-1"]
    assert {path.stat().st_size for path in (tmp_path / "logs").glob("*.out")} == {3000 * 301}


@pytest.mark.parametrize("words", ["--log-dir disk train.py", "--log-dir disk train.py > disk/train.log 2>&1"])
def test_ranks_continue_when_the_disk_of_their_log_files_is_full(tmp_path: Path, words: str) -> None:
    ended = _run(tmp_path, words)
    assert ended.returncode == 0, ended.stderr
    assert _trained(tmp_path) == ["trained-0", "trained-1"]
    if ">" not in words:
        assert "disk/rank-1.out: No space left on device; from now on the output of that rank is" in ended.stderr
        assert ended.stdout.count("x" * 300) > 3000, "the rest of both ranks is shown"
