# SPDX-License-Identifier: Apache-2.0
"""On a machine that lacks programs `make test` names each with its package, and leaves out the tiers that need it.

The machine is a PATH of a few programs. Its ``id`` is a stand-in: these tests may run as root, and install nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / ".ci" / "programs"


@pytest.fixture
def few_programs(tmp_path: Path) -> Path:
    """A folder of programs: what the script itself needs, and what C++ needs."""
    for name in ("bash", "dirname", "env", "cat", "g++"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    return tmp_path


def asked(what: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAMS, what],
        env={"PATH": str(path), "PYTHON": sys.executable},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_each_missing_program_is_named_in_a_line_with_its_package_and_tiers(few_programs: Path) -> None:
    done = asked("install", few_programs)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert all(line.startswith("missing: ") for line in lines)
    assert "missing: openmpi-bin: install it (sudo apt-get install openmpi-bin); needed by: multihost e2e" in lines
    assert any(line.startswith("missing: root: ") and line.endswith("needed by: multihost") for line in lines)
    assert not any("g++" in line for line in lines)


def test_the_tiers_that_need_them_are_left_out(few_programs: Path) -> None:
    assert asked("tiers", few_programs).stdout.split() == ["tests/unit", "tests/multiprocess"]
    (few_programs / "g++").unlink()
    assert asked("tiers", few_programs).stdout.split() == []


def test_omitted_settings_are_named_at_the_end(few_programs: Path) -> None:
    assert "left out, since programs are missing: multihost e2e (" in asked("left-out", few_programs).stdout


def test_a_wrong_value_is_an_error(few_programs: Path) -> None:
    done = asked("nothing", few_programs)
    assert done.returncode == 2
    assert "usage" in done.stderr
