# SPDX-License-Identifier: Apache-2.0
"""What a rank has in memory when its script starts, and calls when it exits: what the script names, and no more."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SEEN = """
import sys, weakref
parts = ("rankwise.comm.join", "rankwise.shard.shard", "torch.distributed.fsdp", "torch.distributed.checkpoint")
at_exit = [one for one in weakref.finalize._registry if one.atexit]
print([part for part in parts if part in sys.modules], len(at_exit))

def train():
    {uses}
"""


def seen(folder: Path, uses: str, *words: str) -> tuple[list[str], int]:
    """Return which modules a rank finds in memory, and how many functions of libraries it is to call at exit."""
    (folder / "train.py").write_text(SEEN.format(uses=uses))
    # A new process: those that tests fork have imported everything.
    shown = subprocess.run(
        [sys.executable, "-m", "rankwise", "run", "-n", "1", "--device", "cpu", *words],
        cwd=folder,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    ).stdout
    found, _, number = shown.strip().rpartition(" ")
    return ast.literal_eval(found), int(number)


@pytest.mark.parametrize("words", [("train.py",), ("-m", "train")])
def test_what_a_script_names_is_in_memory_and_nothing_of_torch_is_unregistered_at_exit(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    uses = "import rankwise as rw, torch.distributed.checkpoint; rw.shard(0)"
    found, at_exit = seen(tmp_path, uses, *words)
    assert found[-3:] == ["rankwise.shard.shard", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
    assert at_exit == 0


@pytest.mark.parametrize(
    "uses",
    [
        "return",
        "import torch; torch.shard.join()",  # of something else
        "import rankwise.no_such_module, torch.distributed.no_such_module",
    ],
)
def test_a_rank_does_not_wait_for_what_its_script_does_not_use(tmp_path: Path, uses: str) -> None:
    found, _ = seen(tmp_path, uses, "train.py")
    assert found == []
