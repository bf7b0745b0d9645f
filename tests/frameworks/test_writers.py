# SPDX-License-Identifier: Apache-2.0
"""Files that libraries write, under ``rankwise run --auto``: once, and as plain Python does."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from conftest import HERE, RANKWISE, Launcher

from tests.same_result import Result, differences

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(200)


def _files(folder: Path) -> dict[str, int]:
    """Return how many files there are with each suffix, without those of one process that wandb keeps."""
    found: dict[str, int] = {}
    for path in folder.rglob("*"):
        if path.is_file() and "wandb" not in path.parts:
            kind = "events" if ".tfevents." in path.name else path.suffix
            found[kind] = found.get(kind, 0) + 1
    return found


@pytest.mark.parametrize("script", ["writers_one_device"])
def test_what_libraries_write_is_what_plain_python_writes(script: str, tmp_path: Path) -> None:
    printed: dict[str, Result] = {}
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    files: dict[str, dict[str, int]] = {}
    for name, words in {"plain": (), "auto": (*RANKWISE, "3", "--auto")}.items():
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(HERE / "scripts" / f"{script}.py", folder / "train.py")
        done = Launcher(folder).run("-W", "ignore", *words, "train.py")
        assert done.returncode == 0, done.stderr
        printed[name] = Result(done.returncode, done.stdout, nowhere)
        files[name] = _files(folder)
        assert len(list(folder.glob("wandb/offline-run-*"))) == 1
    assert printed["plain"].stdout.count("\n") == 16
    assert differences(printed["plain"], printed["auto"]) == []
    assert files["auto"] == files["plain"]


READ = """
import json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator("runs/tensorboard").Reload()
print(json.dumps([(event.step, event.value) for event in events.Scalars("loss")]))
"""


def test_logged_values_are_written_to_tensorboard(tmp_path: Path) -> None:
    shutil.copy(HERE / "scripts" / "logged_values.py", tmp_path / "train.py")
    done = Launcher(tmp_path).run("-W", "ignore", *RANKWISE, "2", "--report", "runs", "train.py")
    assert done.returncode == 0, done.stderr
    # In a process of its own: TensorBoard changes variables of the one that imports it.
    read = Launcher(tmp_path).run("-W", "ignore", "-c", READ)
    assert read.returncode == 0, read.stderr
    # The mean over ranks by their weights, 1 and 2.
    assert json.loads(read.stdout) == [[step, pytest.approx(step - 1 + 20.0 / 3.0)] for step in (1, 2, 3, 4)]
    assert len(list((tmp_path / "runs" / "tensorboard").iterdir())) == 1
