# SPDX-License-Identifier: Apache-2.0
"""What runs on GPUs is what runs on CPUs: the trainings of tests/multiprocess, with a GPU per rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import pytest

sys.path.append(str(Path(__file__).parents[1] / "multiprocess"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.accelerator.is_available():
        return
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    items[:] = [item for item in items if item not in here]
    config.hook.pytest_deselected(items=here)


def pytest_report_collectionfinish() -> str:
    return "" if torch.accelerator.is_available() else "tests/gpu needs a GPU, and torch sees none on this machine"
