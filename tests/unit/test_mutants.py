# SPDX-License-Identifier: Apache-2.0
"""Every mistake of ``tests/mutants`` can still be put into the code: its line stands once, and its tests exist."""

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
