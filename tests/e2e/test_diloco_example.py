# SPDX-License-Identifier: Apache-2.0
"""The example of worker groups that exchange updates rarely, by the command its docstring gives, and resumed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

EXAMPLE = Path(__file__).parents[2] / "examples" / "diloco.py"
LIMIT_SECONDS = 55


def losses_of(command: Command, *options: str) -> tuple[list[int], list[float], list[float]]:
    """Run the example on two ranks; return the steps it reported, their losses, and the ranks' losses at the end."""
    done = command.rankwise("run", "-n", "2", str(EXAMPLE), *options, seconds=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    steps = [(int(step), float(loss)) for step, loss in re.findall(r"step +(\d+) +loss (\S+)", done.stdout)]
    final = [float(loss) for loss in re.findall(r"\[rank .* held out: loss (\S+)", done.stdout)]
    return [step for step, _ in steps], [loss for _, loss in steps], final


@pytest.mark.timeout(120)
def test_worker_groups_learn_the_same_and_resume_from_a_checkpoint(command: Command, tmp_path: Path) -> None:
    options = ("--every", "10", "--checkpoints", str(tmp_path), "--save-every", "20")
    steps, losses, final = losses_of(command, *options, "--steps", "25")
    more_steps, more_losses, more_final = losses_of(command, *options, "--steps", "45")
    assert (steps, more_steps) == ([10, 20], [30, 40]), "the second goes on from step 20, where the first saved"
    # 5.5 is what knowing nothing costs; the mean over bytes of a text is about 3.2 where only their frequency is known.
    assert losses[0] > losses[1] > more_losses[0] > more_losses[1]
    assert more_final[0] < final[0] < 4.5
    assert final[0] == final[1], "the parameters are the same bits on both worker groups"
    assert more_final[0] == more_final[1]
    assert more_final[0] < 3.6
