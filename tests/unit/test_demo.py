# SPDX-License-Identifier: Apache-2.0
"""`make demo` uses a Python that has what it needs, and says what it downloads before it installs anything.

Its Python here is a stand-in that notes what it is asked, in a folder of its own: nothing is installed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = "https://index.invalid/cpu"
STAND_IN = """#!/bin/bash
echo "python $*"
case "$*" in
    *"import cloudpickle"*) [ "$HAS_ALL" ] ;;
    *urllib*) [ "$ANSWERS" ] ;;
    "-m venv"*) mkdir -p .venv-demo/bin && cp "$0" .venv-demo/bin/python ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in (".ci/demo", "requirements/demo.lock"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def demo(clone: Path, **variables: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(clone / "python"), **variables}
    done = subprocess.run(
        [clone / ".ci/demo"], env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert "examples/compare_ranks.py" in done.stdout.splitlines()[-1]
    return done.stdout


def test_a_python_that_has_all_is_used_as_it_is(clone: Path) -> None:
    shown = demo(clone, HAS_ALL="1", TORCH_INDEX=INDEX)
    assert "nothing is installed" in shown
    assert "pip" not in shown
    assert not (clone / ".venv-demo").exists()


def test_the_size_is_shown_before_torch_for_cpus_is_installed(clone: Path) -> None:
    shown = demo(clone, ANSWERS="1", TORCH_INDEX=INDEX)
    before, _, after = shown.partition("pip install")
    assert "0.3 GB" in before
    assert f"--index-url {INDEX} --no-deps torch==" in after.splitlines()[0]
    assert "--requirement requirements/demo.lock" in after
    assert "--quiet" not in after, "pip shows its progress"


@pytest.mark.parametrize("index", [INDEX, ""])
def test_without_that_index_the_size_is_that_of_pypi(clone: Path, index: str) -> None:
    shown = demo(clone, TORCH_INDEX=index)
    before, _, after = shown.partition("pip install")
    assert "2.8 GB" in before
    assert (f"{INDEX} does not answer" in before) == bool(index)
    assert "--index-url" not in after


def test_it_installs_once(clone: Path) -> None:
    demo(clone, ANSWERS="1", TORCH_INDEX=INDEX)
    assert "pip" not in demo(clone, ANSWERS="1", TORCH_INDEX=INDEX)
