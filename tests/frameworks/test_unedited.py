# SPDX-License-Identifier: Apache-2.0
"""A framework's script for one device under ``rankwise run --auto``: what plain Python prints and writes."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from conftest import HERE, RANKWISE, Launcher

from tests.same_result import Result, differences

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(200)


# BERT's layers look whether a mask hides anything, and GPT-2's loss is computed inside the model.
PARTLY_WHOLE = ("transformers_one_device",)


@pytest.mark.parametrize("script", ["monai_one_device", "transformers_one_device"])
def test_a_script_for_one_device_gives_what_plain_python_gives(script: str, tmp_path: Path) -> None:
    found: dict[str, Result] = {}
    for name, words in {"plain": (), "auto": (*RANKWISE, "2", "--auto")}.items():
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(HERE / "scripts" / f"{script}.py", folder / "train.py")
        done = Launcher(folder).run("-W", "ignore", *words, "train.py")
        assert done.returncode == 0, done.stderr
        assert script in PARTLY_WHOLE or "runs whole" not in done.stderr
        found[name] = Result(done.returncode, done.stdout, folder)
    assert found["plain"].stdout.count("\n") >= 6
    assert differences(found["plain"], found["auto"]) == []
