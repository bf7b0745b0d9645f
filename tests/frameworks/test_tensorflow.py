# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's tensors in collectives, and a loop of Keras whose gradients rankwise adds up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import HERE, RANKWISE

if TYPE_CHECKING:
    from conftest import Launcher

EXAMPLE = Path(__file__).parents[2] / "examples" / "keras_digits.py"


def test_every_collective_takes_and_returns_tensorflows_tensors(launcher: Launcher) -> None:
    done = launcher.run(*RANKWISE, "2", str(HERE / "scripts" / "tensorflow_collectives.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every collective took TensorFlow's tensors" in done.stdout


# Four processes import TensorFlow, which on a busy machine takes longer than all that other tests do.
@pytest.mark.timeout(180)
def test_keras_digits_learn_the_same_on_one_rank_and_on_three(launcher: Launcher) -> None:
    losses, accuracies = [], []
    for ranks in ("1", "3"):
        done = launcher.run(*RANKWISE, ranks, str(EXAMPLE), "--epochs", "3")
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append([float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)])
        accuracies.append(re.findall(r"accuracy (\S+)", done.stdout))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert len(losses[0]) == 3
    assert accuracies[0] == accuracies[1]
    assert float(accuracies[0][0]) > 0.9
