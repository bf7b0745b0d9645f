# SPDX-License-Identifier: Apache-2.0
"""A tensor as the bytes it lies in: what only travels need not have a dtype that the way knows."""

from __future__ import annotations

import torch


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as [n] bytes in the same memory."""
    # One element counts as contiguous at any stride; torch's view does not think so.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
