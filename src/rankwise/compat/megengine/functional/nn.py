# SPDX-License-Identifier: Apache-2.0
"""``megengine.functional.nn``: the loss that ``megengine.functional.loss`` has too; the rest is torch's."""

from __future__ import annotations

from typing import Any

from rankwise.compat.megengine.functional.loss import cross_entropy
from rankwise.compat.megengine.not_offered import refused

__all__ = ["cross_entropy"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - nothing is returned
    instead = {} if name.startswith("__") else {name: "torch.nn.functional"}
    raise refused("megengine.functional.nn", name, instead, __all__)
