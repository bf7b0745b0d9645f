# SPDX-License-Identifier: Apache-2.0
"""``megengine.functional``: ``distributed``, and what MegEngine's tutorial of it calls. The rest is torch's."""

from __future__ import annotations

from typing import Any

from rankwise.compat.megengine.functional import distributed, loss, nn
from rankwise.compat.megengine.functional.algebra import flatten, matmul
from rankwise.compat.megengine.not_offered import refused

__all__ = ["distributed", "flatten", "loss", "matmul", "nn"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - nothing is returned
    instead = {} if name.startswith("__") else {name: "torch.nn.functional, or torch itself"}
    raise refused("megengine.functional", name, instead, __all__)
