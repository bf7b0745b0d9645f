# SPDX-License-Identifier: Apache-2.0
"""The snippets that a reader pastes first, on two ranks with an accelerator: a model left on the CPU fails there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from on_standin import build_standin, python_with_standin

pytestmark = pytest.mark.timeout(240)  # the first test may have to compile the device

ROOT = Path(__file__).parents[2]
READERS_PART = (ROOT / "tests" / "e2e" / "readers_part.py").read_text(encoding="utf-8")
LOOP = """
for x, y in loader:
    loss_fn(model(x), y).backward()
"""
"""What follows the front page's change, which ends with the loader."""
RESULT = """
import sys
sys.stdout.write(f"RESULT {world.rank} {x.device} {next(model.parameters()).device}\\n")
"""


@pytest.fixture(scope="module", autouse=True)
def _standin_is_built() -> None:
    build_standin()


def _block_of(page: str, language: str) -> str:
    """Return the first block of a page in a language; of a diff, what it leaves."""
    block = re.search(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    if language != "diff":
        return block[1]
    return "\n".join(line[1:] for line in block[1].splitlines() if not line.startswith("-"))


@pytest.mark.parametrize(
    ("page", "language", "rest"),
    [
        ("docs/index.md", "diff", LOOP),
        ("docs/zh/index.md", "diff", LOOP),
        ("README.md", "diff", ""),
        ("README.md", "python", ""),
        ("docs/first-steps.md", "python", ""),
    ],
    ids=["front page", "Chinese front page", "README's change", "README's script", "first steps"],
)
def test_a_snippet_trains_on_an_accelerator_as_written(tmp_path: Path, page: str, language: str, rest: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(READERS_PART + _block_of(page, language) + rest + RESULT, encoding="utf-8")
    ended = python_with_standin("-m", "rankwise", "run", "-n", "2", str(script), folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = {line for line in ended.stdout.splitlines() if line.startswith("RESULT")}
    assert found == {f"RESULT {rank} standin:{rank} standin:{rank}" for rank in range(2)}
