# SPDX-License-Identifier: Apache-2.0
"""``megengine.functional``, of which only ``distributed`` is here: the rest is ``torch.nn.functional``."""

from __future__ import annotations

from typing import Any

from rankwise.compat.megengine.functional import distributed
from rankwise.compat.megengine.not_offered import refused

__all__ = ["distributed"]

_NOT_OFFERED = {
    **dict.fromkeys(
        ("conv2d", "dropout", "linear", "loss", "nn", "relu", "softmax", "max_pool2d"), "torch.nn.functional"
    ),
    **dict.fromkeys(("concat", "flatten", "mean", "ones_like", "reshape", "sum", "topk_accuracy"), "torch's own"),
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - nothing is returned
    raise refused("megengine.functional", name, _NOT_OFFERED, __all__)
