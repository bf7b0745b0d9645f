# SPDX-License-Identifier: Apache-2.0
"""The scripts of the README, as written, by commands of its table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
READERS_PART = Path(__file__).with_name("readers_part.py").read_text(encoding="utf-8")
RANKWISE = [sys.executable, "-m", "rankwise", "run", "-n", "2"]


def block_of(page: str, language: str) -> str:
    """Return the first block of a page in a language."""
    block = re.search(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    return block[1]


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable],
        RANKWISE,
        [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"],
    ],
    ids=["python", "rankwise", "torchrun"],
)
def test_the_script_runs_as_written(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "train.py").write_text(READERS_PART + block_of("README.md", "python"), encoding="utf-8")
    done = subprocess.run([*command, "train.py"], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    saved = sorted(path.name for path in (tmp_path / "runs" / "net").iterdir())
    assert saved == ["checkpoint-000008", "checkpoint-000009", "checkpoint-000010"]


def test_both_sides_of_the_edit_train_to_the_same(tmp_path: Path) -> None:
    """One device and two ranks, over three batches of which the last is short."""
    edit = block_of("README.md", "diff").replace("shuffle=True", "shuffle=False").splitlines()
    before, after = ("\n".join(line[1:] for line in edit if not line.startswith(other)) for other in ("+", "-"))
    trained = []
    for name, script, command in (("before", before, [sys.executable]), ("after", after, RANKWISE)):
        (tmp_path / f"{name}.py").write_text(
            "import os\nimport torch\ntorch.set_default_dtype(torch.float64)\n"
            f"{READERS_PART.partition('import torch')[2]}\n{script}\n"
            f"torch.save(model.state_dict(), '{name}-' + os.environ.get('RANK', '0') + '.pt')\n",
            encoding="utf-8",
        )
        done = subprocess.run(
            [*command, f"{name}.py"], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=50
        )
        assert done.returncode == 0, done.stderr
        trained.append(torch.load(tmp_path / f"{name}-0.pt"))
    for key, value in trained[0].items():
        torch.testing.assert_close(trained[1][key], value, rtol=1e-10, atol=1e-12)


def test_the_commands_of_the_readme_are_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
