# SPDX-License-Identifier: Apache-2.0
"""``megengine.functional``: ``distributed``, and what MegEngine's tutorial of it calls. The rest is torch's."""

from __future__ import annotations

import torch

from rankwise.compat.megengine.alias import refusing
from rankwise.compat.megengine.functional import distributed, loss, nn

__all__ = ["distributed", "flatten", "loss", "matmul", "nn"]


def flatten(inp: torch.Tensor, start_axis: int = 0, end_axis: int = -1) -> torch.Tensor:
    """Return ``inp`` with the dimensions from ``start_axis`` to ``end_axis`` as one."""
    return torch.flatten(inp, start_axis, end_axis)


def matmul(
    inp1: torch.Tensor,
    inp2: torch.Tensor,
    transpose_a: bool = False,  # noqa: FBT001, FBT002 - as MegEngine has it
    transpose_b: bool = False,  # noqa: FBT001, FBT002 - as MegEngine has it
) -> torch.Tensor:
    """Return the matrix product, each factor transposed in its last two dimensions where asked."""
    first = inp1.transpose(-2, -1) if transpose_a else inp1
    second = inp2.transpose(-2, -1) if transpose_b else inp2
    return first @ second


__getattr__ = refusing("megengine.functional", __all__, "torch.nn.functional, or torch itself")
