# SPDX-License-Identifier: Apache-2.0
"""The power goes amid a save: what is left is the checkpoint before or the new one; the new one once save returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from power_loss import Disk, write

from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.export import save_weights
from rankwise.checkpoint.import_weights import load_weights
from rankwise.checkpoint.load import load
from rankwise.checkpoint.save import save
from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from power_loss import Tree

pytestmark = pytest.mark.usefixtures("world_of_one")


def _save(folder: Path, how: str, number: int) -> None:
    state = {"n": number, "t": torch.full((3,), float(number))}
    if how == "one directory":
        save(folder / "runs" / "last", extra=state)
    elif how == "weights":
        save_weights(folder / "runs" / "of" / "last.safetensors", _model(number))
    else:
        Checkpointer(folder / "runs", keep=1).save(step=7 if how == "one number" else None, extra=state)


def _model(number: int) -> torch.nn.Module:
    model = torch.nn.Linear(3, 2)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float(number))
    return model


def _restored(tree: Tree, folder: Path, how: str) -> int:
    """Return the number that is loaded from what was left, 0 where there is nothing."""
    write(tree, folder)
    extra: dict[str, Any] = {}
    if how == "one directory":
        try:
            extra = load(folder / "runs" / "last")["extra"]
        except CheckpointError as error:
            assert "there is no such directory" in str(error)
            return 0
    elif how == "weights":
        model, path = _model(0), folder / "runs" / "of" / "last.safetensors"
        if path.exists():
            load_weights(path, model)
        numbers = {number for parameter in model.parameters() for number in parameter.flatten().tolist()}
        assert len(numbers) == 1
        return int(numbers.pop())
    elif Checkpointer(folder / "runs").restore(extra=extra) is None:
        return 0
    assert extra["t"].eq(extra["n"]).all()
    return extra["n"]


@pytest.mark.parametrize("how", ["numbers", "one number", "one directory", "weights"])
@pytest.mark.parametrize("first", [1, 2], ids=["in a new folder", "after another"])
def test_no_save_is_lost_once_it_returned_and_none_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, first: int
) -> None:
    disk_path = tmp_path / "disk"
    disk_path.mkdir()
    for number in range(1, first):
        _save(disk_path, how, number)
    disk = Disk(disk_path)
    with disk.followed(monkeypatch):
        _save(disk_path, how, first)
        after = disk.after()
    for index, tree in enumerate(disk.left):
        assert _restored(tree, tmp_path / str(index), how) in (first - 1, first), tree
    for index, tree in enumerate(after):
        assert _restored(tree, tmp_path / f"after-{index}", how) == first, tree
