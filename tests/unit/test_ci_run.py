# SPDX-License-Identifier: Apache-2.0
"""`.ci/run` on a small disk, with the real script; make and df are replaced by short ones that tell what they did."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
MAKE = """#!/usr/bin/env bash
echo "$1"
case $1 in
    frameworks) mkdir -p .venv-frameworks ;;
    version-*) mkdir -p ".venv-${1#version-}" ;;
esac
"""


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with the script, and an environment of a developer."""
    _program(tmp_path / "bin" / "make", MAKE)
    _program(tmp_path / ".ci" / "programs", "#!/bin/sh\n")
    shutil.copy(SCRIPT, tmp_path / ".ci" / "run")
    (tmp_path / "Makefile").write_text("VERSIONS := 3.13-2.15.0 3.11-2.9.1\n")
    (tmp_path / ".venv-3.11-2.9.1").mkdir()
    return tmp_path


def _run(folder: Path, gigabytes_free: int) -> list[str]:
    _program(folder / "bin" / "df", f"#!/bin/sh\necho Avail\necho {gigabytes_free}\n")
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.check_output([folder / ".ci" / "run"], env={**os.environ, "PATH": path}, text=True).splitlines()


@pytest.mark.timeout(60)
def test_on_a_small_disk_only_the_environments_of_this_run_are_removed(folder: Path) -> None:
    # du rounds up what is there to one gigabyte.
    told, *made = _run(folder, 38)
    assert told.startswith("39 GB are free")
    assert made == ["test", "docs-browser", "frameworks", "version-3.13-2.15.0", "version-3.11-2.9.1"]
    assert [path.name for path in folder.glob(".venv*")] == [".venv-3.11-2.9.1"]


@pytest.mark.timeout(60)
def test_environments_that_exist_count_as_free_space(folder: Path) -> None:
    assert "versions" in _run(folder, 39)
    assert {path.name for path in folder.glob(".venv*")} == {".venv-3.11-2.9.1", ".venv-frameworks"}
