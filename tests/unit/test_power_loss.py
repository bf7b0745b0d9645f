# SPDX-License-Identifier: Apache-2.0
"""Power loss during a save: the state before or the new state is left; the new one once the save has returned."""

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
from rankwise.parameter_server.snapshot import ServerSnapshots

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
    elif how == "server snapshot":
        snapshots = _snapshots(folder / "runs", _model(number))
        snapshots.updates()
        snapshots.save(number, {0: {"position": number}})
    else:
        Checkpointer(folder / "runs", keep=1).save(step=7 if how == "one number" else None, extra=state)


def _snapshots(folder: Path, model: torch.nn.Module) -> ServerSnapshots:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return ServerSnapshots(
        folder, server=0, num_servers=1, every=1, names=names, parameters=parameters, optimizer=optimizer
    )


def _number_of(model: torch.nn.Module) -> int:
    numbers = {number for parameter in model.parameters() for number in parameter.flatten().tolist()}
    assert len(numbers) == 1
    return int(numbers.pop())


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
        return _number_of(model)
    elif how == "server snapshot":
        model = _model(0)
        snapshots = _snapshots(folder / "runs", model)
        updates = snapshots.updates()
        if updates:
            assert snapshots.load(updates[-1]) == {"0": {"position": updates[-1]}}
        return _number_of(model)
    elif Checkpointer(folder / "runs").restore(extra=extra) is None:
        return 0
    assert extra["t"].eq(extra["n"]).all()
    return extra["n"]


@pytest.mark.parametrize("how", ["numbers", "one number", "one directory", "weights", "server snapshot"])
@pytest.mark.parametrize("first", [1, 2, 4], ids=["in a new folder", "after another", "after several"])
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
