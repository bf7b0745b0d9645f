# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that exist and cannot be read are an error, and are neither skipped nor removed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
import stat
import subprocess
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from listing import names

from rankwise.checkpoint import files
from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.folder import FRESH
from rankwise.checkpoint.load import load
from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

pytestmark = pytest.mark.usefixtures("world_of_one")

NOBODY = 65534
ALL = ["checkpoint-000001", "checkpoint-000002", "checkpoint-000003"]


def _three(folder: Path) -> Path:
    """Save three checkpoints as another job has; return the newest."""
    with Checkpointer(folder) as checkpoints:
        paths = [checkpoints.save(extra={"n": number, "t": torch.ones(5)}) for number in (1, 2, 3)]
    return paths[-1]


def _later_version(path: Path) -> AbstractContextManager[None]:
    manifest = path / "manifest.json"
    sections = json.loads(manifest.read_bytes())
    del sections["checksum"]
    sections |= {"format_version": 3, "rankwise_version": "9.9"}
    rest = (",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sections.items()) + "\n}\n").encode()
    manifest.write_bytes(b'{"checksum": "sha256:' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest)
    return nullcontext()


def _later_version_with_another_checksum(path: Path) -> AbstractContextManager[None]:
    (path / "manifest.json").write_text('{"format_version": 4, "rankwise_version": "9.9", "checksum": "blake3:00"}')
    return nullcontext()


def _link_in_a_circle(path: Path, name: str) -> AbstractContextManager[None]:
    (path / name).unlink()
    (path / name).symlink_to(name)
    return nullcontext()


def _manifest_in_a_circle(path: Path) -> AbstractContextManager[None]:
    return _link_in_a_circle(path, "manifest.json")


def _part_in_a_circle(path: Path) -> AbstractContextManager[None]:
    return _link_in_a_circle(path, "part-00000.safetensors")


def _part_that_leads_nowhere(path: Path) -> AbstractContextManager[None]:
    part = path / "part-00000.safetensors"
    part.unlink()
    part.symlink_to("/nowhere/part")
    return nullcontext()


def _folder_for_a_part(path: Path) -> AbstractContextManager[None]:
    (path / "part-00000.safetensors").unlink()
    (path / "part-00000.safetensors").mkdir()
    return nullcontext()


def _file_for_the_checkpoint(path: Path) -> AbstractContextManager[None]:
    shutil.rmtree(path)
    path.write_text("")
    return nullcontext()


def _link_for_the_checkpoint(path: Path) -> AbstractContextManager[None]:
    shutil.rmtree(path)
    path.symlink_to("/nowhere/checkpoint")
    return nullcontext()


@contextmanager
def _forbidden(path: Path) -> Generator[None]:
    (path / "part-00000.safetensors").chmod(0)
    if os.getuid():
        yield
        return
    # Root reads everything; the folders above belong to it alone.
    for parent in path.parents:
        if not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(0o755)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def _no_file_descriptor(_: Path) -> Generator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    # Those that are open stay open, and the next one has no number left.
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def _failing(number: int) -> Generator[None]:
    # A stub: no disk here fails in this way when it is asked to.
    def fail(path: Path) -> Path:
        if path.suffix == ".safetensors":
            raise OSError(number, os.strerror(number), str(path))
        return path

    plain, files.plain = files.plain, fail
    try:
        yield
    finally:
        files.plain = plain


def _stale(_: Path) -> AbstractContextManager[None]:
    return _failing(errno.ESTALE)


def _bad_sector(_: Path) -> AbstractContextManager[None]:
    return _failing(errno.EIO)


UNREADABLE: dict[Callable[[Path], AbstractContextManager[None]], str] = {
    _later_version: "format version 3; this rankwise reads 1",
    _later_version_with_another_checksum: "format version 4",
    _manifest_in_a_circle: "Too many levels of symbolic links",
    _part_in_a_circle: "Too many levels of symbolic links",
    _part_that_leads_nowhere: "a link to a file that does not exist here",
    _folder_for_a_part: "it is not a regular file",
    _file_for_the_checkpoint: "it is not a directory",
    _link_for_the_checkpoint: "there is no such directory",
    _forbidden: "Permission denied",
    _no_file_descriptor: "Too many open files",
    _stale: "Stale file handle",
    _bad_sector: "Input/output error",
}


@pytest.mark.parametrize(("make", "reason"), UNREADABLE.items(), ids=[make.__name__[1:] for make in UNREADABLE])
def test_a_checkpoint_that_cannot_be_read_is_an_error_and_is_kept(
    tmp_path: Path, make: Callable[[Path], AbstractContextManager[None]], reason: str
) -> None:
    newest = _three(tmp_path)
    model = {"n": 0}
    resumed = Checkpointer(tmp_path, keep=1)
    with make(newest):
        with pytest.raises(CheckpointError, match=reason) as caught:
            resumed.restore(extra=model)
        with pytest.raises(CheckpointError, match=reason):
            load(newest, extra={})
    assert model == {"n": 0}
    # The folder itself must be readable for a fresh start.
    assert ("restore(fresh=True)" in str(caught.value)) == (make is not _no_file_descriptor)
    assert "another folder" in str(caught.value)
    assert names(tmp_path) == ALL
    # A script that catches the error and continues loses nothing either.
    for _ in range(3):
        resumed.save(extra={"n": 9})
    assert names(tmp_path) == [*ALL, "checkpoint-000006"]
    resumed.close()


def test_what_can_be_read_again_is_restored(tmp_path: Path) -> None:
    newest = _three(tmp_path)
    extra: dict[str, Any] = {}
    resumed = Checkpointer(tmp_path)
    with _stale(newest), pytest.raises(CheckpointError):
        resumed.restore(extra=extra)
    assert resumed.restore(extra=extra) == newest
    assert extra["n"] == 3


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"\0" * 300])
def test_checkpoints_that_are_all_damaged_are_an_error(tmp_path: Path, content: bytes) -> None:
    _three(tmp_path)
    for name in ALL:
        (tmp_path / name / "manifest.json").write_bytes(content)
    resumed = Checkpointer(tmp_path, keep=1)
    for call in (lambda: resumed.restore(extra={}), resumed.latest):
        with pytest.raises(CheckpointError, match="holds checkpoints, and all are damaged") as caught:
            call()
        for name in ALL:
            assert name in str(caught.value)
        assert "restore(fresh=True)" in str(caught.value)
    assert names(tmp_path) == ALL


def test_one_that_is_damaged_is_skipped_for_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = _three(tmp_path)
    (newest / "manifest.json").write_bytes(b"")
    resumed = Checkpointer(tmp_path, keep=2)
    assert resumed.restore(extra={}) == tmp_path / "checkpoint-000002"
    assert f"skipping {newest}: manifest.json is not a rankwise manifest" in caplog.text
    resumed.save(extra={})
    assert names(tmp_path) == ["checkpoint-000002", "checkpoint-000003", "checkpoint-000004"]


def test_the_latest_checkpoint_is_an_error_if_it_cannot_be_read(tmp_path: Path) -> None:
    newest = _three(tmp_path)
    with _manifest_in_a_circle(newest), pytest.raises(CheckpointError, match="Too many levels"):
        Checkpointer(tmp_path).latest()
    assert Checkpointer(tmp_path / "new").latest() is None


def test_a_fresh_start_ignores_and_keeps_what_is_there(tmp_path: Path) -> None:
    newest = _three(tmp_path)
    _manifest_in_a_circle(newest)
    extra = {"n": 0}
    fresh = Checkpointer(tmp_path, keep=1)
    assert fresh.restore(fresh=True, extra=extra) is None
    assert fresh.latest() is None
    assert extra == {"n": 0}
    with pytest.raises(CheckpointError, match="of an earlier run and was ignored: it is not replaced"):
        fresh.save(step=2, extra={"n": 4})
    for number in (4, 5):
        fresh.save(extra={"n": number})
    assert names(tmp_path) == [*ALL, "checkpoint-000005"]
    fresh.close()
    later = Checkpointer(tmp_path, keep=1)
    assert later.restore(extra=extra) == tmp_path / "checkpoint-000005"
    assert extra == {"n": 5}


def test_a_restart_of_a_fresh_job_continues_from_its_own_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("folder", "nothing"):
        path = tmp_path / found
        if found == "folder":
            _three(path)
        monkeypatch.setenv("RANKWISE_RUN_ID", "this-job")
        extra = {"n": 0}
        assert Checkpointer(path).restore(fresh=True, extra=extra) is None
        # The first attempt has saved nothing.
        monkeypatch.setenv("RANKWISE_ATTEMPT", "1")
        with Checkpointer(path) as second:
            assert second.restore(fresh=True, extra=extra) is None
            saved = second.save(extra={"n": 7})
        monkeypatch.setenv("RANKWISE_ATTEMPT", "2")
        assert Checkpointer(path).restore(fresh=True, extra=extra) == saved
        assert extra == {"n": 7}
        monkeypatch.setenv("RANKWISE_RUN_ID", "next-job")
        assert Checkpointer(path).restore(fresh=True, extra=extra) is None
        monkeypatch.delenv("RANKWISE_ATTEMPT")


def test_checkpoints_of_another_run_are_kept_by_a_job_that_restored_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _three(tmp_path)
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        for number in (4, 5, 6):
            checkpoints.save(extra={"n": number})
    assert names(tmp_path) == [*ALL, "checkpoint-000006"]
    assert caplog.text.count("removes no checkpoint that this job has not restored") == 1
    assert all(name in caplog.text for name in ALL)
    # Once it has restored the newest, those before it are superseded.
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.restore(extra={})
        checkpoints.save(extra={"n": 7})
    assert names(tmp_path) == ["checkpoint-000007"]


def test_an_older_one_that_cannot_be_read_is_not_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _three(tmp_path)
    _later_version(tmp_path / "checkpoint-000001")
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        assert checkpoints.restore(extra={}) == tmp_path / "checkpoint-000003"
        checkpoints.save(extra={})
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000004"]
    assert "checkpoint-000001 is kept: manifest.json has format version 3" in caplog.text


def _link_to_an_unmounted_disk(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("/nowhere/disk")


def _folder_in_a_circle(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder)


def _file_for_the_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_link_to_an_unmounted_disk, "which does not exist here"),
        (_folder_in_a_circle, "Too many levels of symbolic links"),
        (_file_for_the_folder, "Not a directory"),
    ],
)
@pytest.mark.parametrize("inner", ["", "deep/run"])
def test_a_folder_that_cannot_be_listed_is_an_error(
    tmp_path: Path, make: Callable[[Path], None], reason: str, inner: str
) -> None:
    _three(tmp_path / "disk" / inner)
    make(tmp_path / "disk")
    with pytest.raises(CheckpointError, match=r"folder of checkpoints .* cannot be read") as caught:
        Checkpointer(tmp_path / "disk" / inner).restore(extra={})
    assert reason in str(caught.value)


def test_a_listing_that_breaks_off_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _three(tmp_path)

    # A stub: no folder here breaks off when it is asked to.
    def broken(self: Path) -> Generator[Path]:
        yield self / "checkpoint-000001"
        raise OSError(errno.EIO, "Input/output error")

    checkpoints = Checkpointer(tmp_path, keep=1)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", broken)
        for call in (lambda: checkpoints.restore(extra={}), checkpoints.latest, lambda: checkpoints.save(extra={})):
            with pytest.raises(CheckpointError, match="Input/output error"):
                call()
    assert names(tmp_path) == ALL


def test_a_removed_folder_is_created_and_locked_again_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "net"
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(extra={"n": 1})
        shutil.rmtree(folder)
        checkpoints.save(extra={"n": 2})
        assert f"{folder} was removed with its checkpoints while this job saves there" in caplog.text
        assert (folder / ".rankwise-lock-1").exists()
        assert load(folder / "checkpoint-000001") == {"extra": {"n": 2}}


def test_a_disk_that_is_unmounted_while_a_job_saves_there_is_an_error(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "rankwise-test", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    with Checkpointer(disk / "net") as checkpoints:
        checkpoints.save(extra={"n": 1})
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
        with pytest.raises(CheckpointError, match="is no longer on the disk that this job saves to"):
            checkpoints.save(extra={"n": 2})
    assert list(disk.iterdir()) == []


def test_a_restart_that_finds_nothing_where_it_saved_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "launcher").mkdir()
    monkeypatch.setenv("RANKWISE_STACK_FILE", str(tmp_path / "launcher" / "stack"))
    folder = tmp_path / "net"
    with Checkpointer(folder) as checkpoints:
        assert checkpoints.restore(extra={}) is None
        checkpoints.save(extra={"n": 1})
    shutil.rmtree(folder)
    monkeypatch.setenv("RANKWISE_ATTEMPT", "1")
    with pytest.raises(CheckpointError, match="none is there any more"):
        Checkpointer(folder).restore(extra={})
    assert Checkpointer(folder).restore(fresh=True, extra={}) is None
    assert Checkpointer(tmp_path / "another").restore(extra={}) is None
    assert not (tmp_path / "another" / FRESH).exists()
