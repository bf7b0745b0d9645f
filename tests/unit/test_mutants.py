# SPDX-License-Identifier: Apache-2.0
"""Every mistake of ``tests/mutants`` can still be put into the code: its line stands once, and its tests exist.

And every module has a row of tests, of which each part exists.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests/mutants").glob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_mistakes_fit_the_code(file: Path) -> None:
    for mistake in tomllib.loads(file.read_text(encoding="utf-8")).get("mistake", []):
        source = (ROOT / mistake["path"]).read_text(encoding="utf-8")
        assert source.count(mistake["old"]) == 1, f"{mistake['what']}: {mistake['path']} no longer holds its line once"
        paths = [one.partition("::")[0] for one in mistake["tests"] if one.startswith("tests/")]
        assert paths
        assert [path for path in paths if not (ROOT / path).exists()] == [], mistake["what"]


def test_each_module_is_in_a_room_that_has_tests() -> None:
    rooms = tomllib.loads((ROOT / "tests/mutants/tests_of_rooms.toml").read_text(encoding="utf-8"))["tests"]
    source = ROOT / "src" / "rankwise"
    modules = [path.relative_to(source).as_posix() for path in source.rglob("*.py")]
    # As draw.py chooses: the row with the longest beginning.
    chosen = {
        module: max((room for room in rooms if module.startswith(room)), key=len, default="") for module in modules
    }
    assert [module for module, room in chosen.items() if not room] == []
    assert sorted(rooms.keys() - chosen.values()) == [], "rows of modules that were moved"
    for room, patterns in rooms.items():
        assert [one for one in patterns if not any((ROOT / "tests").glob(one))] == [], room
