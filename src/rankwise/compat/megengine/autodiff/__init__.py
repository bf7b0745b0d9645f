# SPDX-License-Identifier: Apache-2.0
"""``megengine.autodiff``: the GradManager, on torch's autograd."""

from __future__ import annotations

from rankwise.compat.megengine.autodiff.grad_manager import GradManager, NotRecording
from rankwise.compat.megengine.not_offered import refusing

__all__ = ["GradManager", "NotRecording"]

__getattr__ = refusing("megengine.autodiff", __all__, {"Function": "torch.autograd.Function"}.get)
