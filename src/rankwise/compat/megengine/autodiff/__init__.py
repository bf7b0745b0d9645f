# SPDX-License-Identifier: Apache-2.0
"""``megengine.autodiff``: the GradManager, on torch's autograd."""

from __future__ import annotations

from typing import Any

from rankwise.compat.megengine.autodiff.grad_manager import GradManager, NotRecording
from rankwise.compat.megengine.not_offered import refused

__all__ = ["GradManager", "NotRecording"]

_NOT_OFFERED = {"Function": "torch.autograd.Function"}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - nothing is returned
    raise refused("megengine.autodiff", name, _NOT_OFFERED, __all__)
