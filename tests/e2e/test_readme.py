# SPDX-License-Identifier: Apache-2.0
"""The scripts of the README, as written, by commands of its table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

ROOT = Path(__file__).parents[2]
READERS_PART = Path(__file__).with_name("readers_part.py").read_text(encoding="utf-8")
RANKWISE = ["-m", "rankwise", "run", "-n", "2"]


def block_of(page: str, language: str) -> str:
    """Return the first block of a page in a language."""
    block = re.search(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    return block[1]


@pytest.mark.parametrize(
    "words",
    [
        [],
        RANKWISE,
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    ],
    ids=["python", "rankwise", "torchrun"],
)
def test_the_script_runs_as_written(command: Command, words: list[str]) -> None:
    command.write("train.py", READERS_PART + block_of("README.md", "python"))
    done = command.python(*words, "train.py")
    assert done.returncode == 0, done.stderr
    saved = sorted(path.name for path in (command.folder / "runs" / "net").iterdir())
    assert saved == ["checkpoint-000008", "checkpoint-000009", "checkpoint-000010"]


def test_both_sides_of_the_edit_train_to_the_same(command: Command) -> None:
    """One device and two ranks, over three batches of which the last is short."""
    edit = block_of("README.md", "diff").replace("shuffle=True", "shuffle=False").splitlines()
    before, after = ("\n".join(line[1:] for line in edit if not line.startswith(other)) for other in ("+", "-"))
    trained = []
    for name, script, words in (("before", before, []), ("after", after, RANKWISE)):
        command.write(
            f"{name}.py",
            "import os\nimport torch\ntorch.set_default_dtype(torch.float64)\n"
            f"{READERS_PART.partition('import torch')[2]}\n{script}\n"
            f"torch.save(model.state_dict(), '{name}-' + os.environ.get('RANK', '0') + '.pt')\n",
        )
        done = command.python(*words, f"{name}.py")
        assert done.returncode == 0, done.stderr
        trained.append(torch.load(command.folder / f"{name}-0.pt"))
    for key, value in trained[0].items():
        torch.testing.assert_close(trained[1][key], value, rtol=1e-10, atol=1e-12)


def test_the_commands_of_the_readme_are_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
