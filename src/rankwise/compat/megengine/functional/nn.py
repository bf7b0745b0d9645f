# SPDX-License-Identifier: Apache-2.0
"""``megengine.functional.nn``: the loss that ``megengine.functional.loss`` has too; the rest is torch's."""

from __future__ import annotations

from rankwise.compat.megengine.alias import refusing
from rankwise.compat.megengine.functional.loss import cross_entropy

__all__ = ["cross_entropy"]

__getattr__ = refusing("megengine.functional.nn", __all__, "torch.nn.functional")
