# SPDX-License-Identifier: Apache-2.0
"""The folder of checkpoints: what is kept, numbered, replaced and removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from listing import names

from rankwise.checkpoint import folder
from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.load import load
from rankwise.checkpoint.save import save
from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (None, [1, 2, 3, 4, 5])])
def test_the_newest_are_kept(tmp_path: Path, keep: int | None, left: list[int], asynchronous: bool) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with Checkpointer(tmp_path, keep=keep, asynchronous=asynchronous) as checkpoints:
        for _ in range(5):
            checkpoints.save(extra={"n": 1})
    assert names(tmp_path) == [folder.checkpoint_name(number) for number in left] + ["notes.txt"]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, keep=2)
    for _ in range(2):
        checkpoints.save(extra={"t": torch.ones(9)})
    (tmp_path / "checkpoint-000002" / "part-00000.safetensors").write_bytes(b"")
    checkpoints.save(extra={"t": torch.ones(9)})
    assert [path.name for path in tmp_path.iterdir()].count("checkpoint-000001") == 1
    checkpoints.save(extra={"t": torch.ones(9)})
    assert names(tmp_path) == ["checkpoint-000003", "checkpoint-000004"]


def test_numbers_may_be_steps_and_one_may_be_saved_again(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    extra = {"n": 0}
    for step, name in (
        (300, "checkpoint-000300"),
        (None, "checkpoint-000301"),
        (1_000_000, "checkpoint-1000000"),
    ):
        assert checkpoints.save(step=step, extra={"n": 1}).name == name
    checkpoints.save(step=1_000_000, extra={"n": 2})
    assert checkpoints.restore(extra=extra) == tmp_path / "checkpoint-1000000"
    assert extra == {"n": 2}
    assert len(names(tmp_path)) == 3


def test_a_number_below_the_newest_is_kept_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpointer(tmp_path, keep=1)
    checkpoints.save(step=9, extra={})
    checkpoints.save(step=3, extra={})
    assert names(tmp_path) == ["checkpoint-000003", "checkpoint-000009"]
    assert "restore() will load checkpoint 9, the newest" in caplog.text


def test_a_folder_that_is_not_a_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("file", "thesis"):
        with pytest.raises(CheckpointError, match="already exists and is not a checkpoint"):
            save(tmp_path / name, n=1)
    save(tmp_path / "empty", n=1)
    save(tmp_path / "empty", n=2)
    assert load(tmp_path / "empty") == {"n": 2}
    assert names(tmp_path) == ["empty", "file", "thesis"]


def test_leftovers_of_dead_saves_are_reported_then_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(n={})
    left = [f".checkpoint-000002.staging-{'a' * 16}", f".checkpoint-000001.removed-{'0' * 16}"]
    others = [f".other.staging-{'a' * 16}", ".checkpoint-000002.staging-mine", ".git"]
    for name in left + others:
        (tmp_path / name / "inside").mkdir(parents=True)
    assert checkpoints.restore(n={}) is not None
    assert f"skipping {tmp_path / left[0]}: it is an unfinished save" in caplog.text
    checkpoints.save(n={})
    assert names(tmp_path) == sorted([*others, "checkpoint-000001", "checkpoint-000002"])
    save(tmp_path / "other", n=1)
    assert others[0] not in names(tmp_path)


def test_a_checkpoint_caught_while_being_replaced_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(extra={"n": 1})
    path.rename(tmp_path / f".{path.name}.replaced-{'a' * 16}")
    extra = {"n": 0}
    assert checkpoints.restore(extra=extra) is not None
    assert extra == {"n": 1}
    assert load(path) == {"extra": {"n": 1}}
    assert checkpoints.save(extra={"n": 2}).name == "checkpoint-000002"
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002"]
