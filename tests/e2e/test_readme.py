# SPDX-License-Identifier: Apache-2.0
"""The script of the README, as written, by the commands of its table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What the README leaves to the reader.
READERS_PART = """
import torch
from torch.utils.data import TensorDataset

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))

torch.manual_seed(0)
train_set = TensorDataset(torch.randn(300, 3), torch.randint(2, (300,)))
loss_fn = torch.nn.functional.cross_entropy
"""


def script_of(page: str) -> str:
    """Return the first Python block of a page."""
    block = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    return block[1]


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable],
        [sys.executable, "-m", "rankwise", "run", "-n", "2"],
        [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"],
    ],
    ids=["python", "rankwise", "torchrun"],
)
def test_the_script_runs_as_written(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "train.py").write_text(READERS_PART + script_of("README.md"), encoding="utf-8")
    done = subprocess.run([*command, "train.py"], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    saved = sorted(path.name for path in (tmp_path / "runs" / "net").iterdir())
    assert saved == ["checkpoint-000008", "checkpoint-000009", "checkpoint-000010"]


def test_both_pages_show_the_same_script() -> None:
    code = [re.sub(r" +#.*", "", script_of(page)) for page in ("README.md", "README.zh.md")]
    assert code[0] == code[1]


def test_the_commands_of_the_readme_are_there() -> None:
    for target in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
