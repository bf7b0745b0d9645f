# SPDX-License-Identifier: Apache-2.0
"""Scripts as each framework's documentation has them, unchanged under torchrun and ``rankwise run``: one result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from conftest import RANKWISE, TORCHRUN

if TYPE_CHECKING:
    from conftest import Launcher, Trained

# One limit for two commands of at most 50 s each.
pytestmark = pytest.mark.timeout(200)

TAKES_DEVICES = ("lightning_trainer", "lightning_fabric")
SCRIPTS = (
    *TAKES_DEVICES,
    "accelerate_loop",
    "transformers_trainer",
    "ignite_parallel",
    "monai_loop",
    "timm_loop",
)


def devices(script: str, number: int) -> list[str]:
    """Return the arguments of a script whose framework wants the number of ranks said by the script."""
    return [str(number)] if script in TAKES_DEVICES else []


def check_alike(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert state.keys() == other.keys()
    assert [name for name in state if not torch.equal(state[name], other[name])] == []


def check_ranks(trained: Trained, number: int) -> None:
    """Hold that the ranks trained one model together, and that one of them wrote the job's files."""
    assert [rank["world_size"] for rank in trained.ranks] == [number] * number
    assert [rank["variable"] for rank in trained.ranks] == [str(number)] * number
    assert trained.times_written == 1
    for rank in trained.ranks:
        check_alike(rank["state"], trained.ranks[0]["state"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_ranks_compute_the_same_as_under_torchrun(launcher: Launcher, script: str) -> None:
    expected = launcher.train(TORCHRUN, 2, script, *devices(script, 2))
    got = launcher.train(RANKWISE, 2, script, *devices(script, 2))
    check_ranks(expected, 2)
    check_ranks(got, 2)
    check_alike(got.ranks[0]["state"], expected.ranks[0]["state"])
    assert [rank["metrics"] for rank in got.ranks] == [rank["metrics"] for rank in expected.ranks]
    assert sorted(path.name for path in got.folder.iterdir()) == sorted(path.name for path in expected.folder.iterdir())
    assert "[rankwise] warning" not in got.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_rank_trains(launcher: Launcher, script: str) -> None:
    trained = launcher.train(RANKWISE, 1, script, *devices(script, 1))
    check_ranks(trained, 1)
    assert "[rankwise]" not in trained.stderr
