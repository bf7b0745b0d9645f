# SPDX-License-Identifier: Apache-2.0
"""``megengine.functional``, of which only ``distributed`` is here: the rest is ``torch.nn.functional``."""

from __future__ import annotations

from typing import Any

from rankwise.compat.megengine.functional import distributed
from rankwise.compat.megengine.not_offered import refused

__all__ = ["distributed"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - nothing is returned
    instead = {} if name.startswith("__") else {name: "torch.nn.functional, or torch itself"}
    raise refused("megengine.functional", name, instead, __all__)
