# SPDX-License-Identifier: Apache-2.0
"""docs/first-steps.md, followed as written: the second run continues where the first one ended."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

PAGE = Path(__file__).parents[2] / "docs" / "first-steps.md"


def test_a_second_run_continues(command: Command) -> None:
    first, resuming = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    before, _, _ = first.partition("with rw.join()")
    printed: list[str] = []
    said: list[str] = []
    for script in (
        first,
        before + resuming,
        (before + resuming).replace("range(loader.epoch, 3)", "range(loader.epoch, 5)"),
    ):
        command.write("train.py", script)
        ended = command.run("-n", "2", "train.py")
        assert ended.returncode == 0, ended.stderr
        printed.append(ended.stdout)
        said.append(ended.stderr)
    plain, fresh, continued = printed
    assert fresh == plain
    assert [line.partition(":")[0] for line in continued.splitlines()] == ["epoch 3", "epoch 4"]
    assert "runs/first/checkpoint-000003" in said[-1]
