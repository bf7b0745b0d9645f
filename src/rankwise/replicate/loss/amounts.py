# SPDX-License-Identifier: Apache-2.0
"""Numbers that a loss is a mean over: Python numbers, or tensors on a device that the CPU does not read in a step.

Reading a value of a device makes the CPU wait for everything that the device has still to do.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rankwise.torch_private.tensors import sparse_values
from rankwise.world.device.kinds import kind_named

if TYPE_CHECKING:
    from rankwise.comm.backends.protocol import Amount


def amount_of(value: float | torch.Tensor) -> Amount:
    """Return a number as it is computed with: a Python number, or a tensor where that is on a device."""
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return float(value)
    dtype = torch.float64 if kind_named(value.device.type).has_float64 else torch.float32
    return value.detach().to(dtype).reshape(())


def plain(amount: Amount) -> float:
    """Return a number for a message to other ranks; NaN for one that is on a device."""
    return math.nan if isinstance(amount, torch.Tensor) else amount


def is_zero(amount: Amount) -> bool:
    """Return whether a number is known to be zero: on a device none is."""
    return not isinstance(amount, torch.Tensor) and amount == 0.0


def ratio(amount: Amount, total: Amount) -> Amount:
    """Return ``amount / total``, and zero for a total of zero."""
    if isinstance(amount, torch.Tensor) or isinstance(total, torch.Tensor):
        found = amount / total
        return torch.where(torch.isfinite(found), found, 0.0)  # type: ignore[arg-type]
    return amount / total if total else 0.0


@torch.no_grad()
def multiply_(gradient: torch.Tensor, factor: Amount) -> torch.Tensor:
    """Multiply in place, and return it. A factor of zero leaves nothing of the gradient, not even a NaN."""
    if isinstance(factor, torch.Tensor):
        return (
            gradient.copy_(_product(gradient, factor)) if _is_half(gradient) else clear_(gradient.mul_(factor), factor)
        )
    if factor == 1.0:
        return gradient
    return gradient.mul_(factor) if factor else gradient.zero_()


def multiplied(gradient: torch.Tensor, factor: Amount) -> torch.Tensor:
    """Return a gradient times a factor. A factor of zero leaves nothing of the gradient, not even a NaN."""
    if isinstance(factor, torch.Tensor):
        return _product(gradient, factor)
    return gradient * factor if factor else torch.zeros_like(gradient)


def clear_(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Fill a gradient with zeros, in place, if a factor on its device is zero."""
    (sparse_values(gradient) if gradient.is_sparse else gradient).masked_fill_(factor == 0, 0.0)
    return gradient


def _product(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    # torch rounds a factor on a device to the gradient's dtype, but a Python number to float32 at most.
    wide = gradient.float() if _is_half(gradient) else gradient
    return clear_(wide * factor, factor).to(gradient.dtype)


def _is_half(gradient: torch.Tensor) -> bool:
    return gradient.dtype in (torch.bfloat16, torch.float16)
