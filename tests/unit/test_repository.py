# SPDX-License-Identifier: Apache-2.0
"""The repository: its root has known entries, no file is large, and public CI runs a target of the Makefile."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
FOLDERS = {".ci", ".github", "benchmarks", "docs", "examples", "requirements", "src", "tests"}
FILES = {
    ".editorconfig",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CITATION.cff",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "README.zh.md",
    "SECURITY.md",
    "pyproject.toml",
}
LARGEST_BYTES = 200_000


IGNORED = (".git", *(line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()))


def is_ignored(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in IGNORED)


def test_the_root_has_known_entries() -> None:
    assert {entry.name for entry in ROOT.iterdir() if not is_ignored(entry.name)} - FOLDERS - FILES == set()


def test_no_file_is_large() -> None:
    paths = [ROOT / name for name in FILES] + [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    sizes = {path.relative_to(ROOT): path.stat().st_size for path in paths if path.is_file()}
    large = {
        path: size for path, size in sizes.items() if size > LARGEST_BYTES and not any(map(is_ignored, path.parts))
    }
    assert {path: size for path, size in large.items() if path.parts[:2] != ("docs", "images")} == {}


def test_public_ci_runs_a_target_of_the_makefile() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    (command,) = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert command.removeprefix("make ") in re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
