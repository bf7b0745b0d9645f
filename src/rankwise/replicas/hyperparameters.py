# SPDX-License-Identifier: Apache-2.0
"""The hyperparameters of an optimizer: a checksum to compare in every step, and their values. Sends nothing."""

from __future__ import annotations

import marshal
import math
import zlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

NOT_COMPARED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Keys of a parameter group that say nothing about what a step computes."""


def checksum_of(optimizer: Optimizer) -> int:
    """Return a checksum of all hyperparameters. Waits for no device: tensors on accelerators are left out."""
    digest = 0
    for group in optimizer.param_groups:
        digest = zlib.crc32(_bytes_of([value for key, value in group.items() if key not in NOT_COMPARED]), digest)
    return digest


def values_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group, as JSON can carry them."""
    return {key: _plain(value, waits=True) for key, value in group.items() if key not in NOT_COMPARED}


def is_same(one: object, other: object) -> bool:
    """Return whether two values of a hyperparameter are the same: also if both are NaN."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return one == other


def _bytes_of(values: list[Any]) -> bytes:
    """Return values as bytes that are the same in every process."""
    try:
        # Of the second version: later ones depend on who else holds a value.
        return marshal.dumps(values, 2)
    except ValueError:  # a tensor among them
        return marshal.dumps([_plain(value, waits=False) for value in values], 2)


def _plain(value: object, *, waits: bool) -> Any:  # noqa: ANN401 - of any kind
    """Return what JSON can carry of a hyperparameter.

    Args:
        value: of a parameter group.
        waits: read a tensor on an accelerator, which takes until the device has come to it.
    """
    if isinstance(value, torch.Tensor):
        is_read = value.numel() == 1 and not value.is_meta and (waits or value.device.type == "cpu")
        return value.item() if is_read else None
    if isinstance(value, list | tuple):
        return [_plain(one, waits=waits) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
