# SPDX-License-Identifier: Apache-2.0
"""Disks that fill up or cannot be written: an error, and the last checkpoint is left."""

from __future__ import annotations

import resource
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from listing import names

from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.load import load
from rankwise.checkpoint.save import save
from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_an_error_and_leaves_the_last_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    checkpoints = Checkpointer(tmp_path, asynchronous=asynchronous)
    checkpoints.save(extra={"t": torch.ones(10)})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # To the writing process the limit is a disk that takes so much and no more.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"could not be saved: File too large") as caught:  # noqa: PT012 - the error comes with either
            checkpoints.save(extra={"t": torch.ones(100_000)})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "free 390.7 KiB there" in str(caught.value)
    assert "checkpoint-000002" in str(caught.value)
    assert names(tmp_path) == ["checkpoint-000001"]
    extra: dict[str, Any] = {}
    assert checkpoints.restore(extra=extra) == tmp_path / "checkpoint-000001"
    checkpoints.save(extra=extra)
    checkpoints.close()
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002"]


def _mount(path: Path, options: str) -> bool:
    """Mount a memory disk where this user and machine may; return whether it is there."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "rankwise-test", str(path)]
    return (
        shutil.which("mount") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB where one can be mounted, else a folder for which the process has a limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    disk = tmp_path / "disk"
    mounted = _mount(disk, "size=1m")
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    yield disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if mounted:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_keeps_the_last_checkpoint_and_takes_smaller_ones(
    small_disk: Path,
) -> None:
    checkpoints = Checkpointer(small_disk)
    checkpoints.save(extra={"n": 1, "t": torch.ones(1000)})
    for size in (2**18 - 60, 2**18, 2**20):
        with pytest.raises(CheckpointError, match=r"No space left on device|File too large") as caught:
            checkpoints.save(extra={"n": 2, "t": torch.ones(size)})
        assert "free " in str(caught.value)
        assert names(small_disk) == ["checkpoint-000001"]
    extra: dict[str, Any] = {}
    assert checkpoints.restore(extra=extra) is not None
    assert extra["n"] == 1
    assert checkpoints.save(extra={"n": 2}).name == "checkpoint-000002"


def test_a_disk_that_turns_read_only_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    mounted = _mount(disk, "size=1m")
    checkpoints = Checkpointer(disk)
    checkpoints.save(extra={"n": 1})
    if mounted:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    else:
        disk.chmod(0o555)
    try:
        with pytest.raises(CheckpointError, match=r"Read-only file system|Permission denied") as caught:
            checkpoints.save(extra={"n": 2})
        assert "use a folder that this user can write to" in str(caught.value)
        extra: dict[str, Any] = {}
        assert checkpoints.restore(extra=extra) == disk / "checkpoint-000001"
        assert extra == {"n": 1}
    finally:
        disk.chmod(0o755) if not mounted else subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="could not be saved: Not a directory"):
        Checkpointer(tmp_path / "file" / "run").save(n=1)
    # Not even root can make directories there.
    with pytest.raises(CheckpointError, match="could not be saved"):
        Checkpointer("/proc/rankwise").save(n=1)


def test_a_failing_rename_brings_the_old_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", n=1)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if "staging" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path / "c", n=2)
    assert load(tmp_path / "c") == {"n": 1}
    assert names(tmp_path) == ["c"]
