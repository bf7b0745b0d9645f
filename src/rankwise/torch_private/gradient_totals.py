# SPDX-License-Identifier: Apache-2.0
"""What torch computes from all gradients at once, to be replaced: norms, and whether GradScaler finds infinite ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    Norm = Callable[..., torch.Tensor]
    Found = dict[torch.device, torch.Tensor]
    """By device, a number that is above zero if a gradient there is infinite."""

total_norm: Norm = clip_grad._get_total_norm  # noqa: SLF001
"""Return the norm of tensors as if they were one. torch's own, however it is replaced."""
_find: Callable[..., Found] = GradScaler._unscale_grads_
_check: Callable[..., Any] = GradScaler._check_scale_growth_tracker  # noqa: SLF001


def replace_norm(norm: Norm) -> None:
    """Have ``clip_grad_norm_``, wherever it was imported, and ``torch.nn.utils.get_total_norm`` call ``norm``."""
    nn.utils.get_total_norm = clip_grad._get_total_norm = norm  # noqa: SLF001


def replace_scaler(complete: Callable[[Optimizer, Found], Found], begin: Callable[[GradScaler], None]) -> None:
    """Have every GradScaler search for infinite gradients in another way.

    Args:
        complete: called with an optimizer and what torch has found; returns the result to use.
        begin: called with a scaler before it unscales, steps or updates.
    """

    def find(scaler: GradScaler, optimizer: Optimizer, *given: Any) -> Found:
        return complete(optimizer, _find(scaler, optimizer, *given))

    def check(scaler: GradScaler, *given: Any) -> Any:
        begin(scaler)
        return _check(scaler, *given)

    GradScaler._unscale_grads_ = cast("Any", find)
    GradScaler._check_scale_growth_tracker = cast("Any", check)  # noqa: SLF001


def restore() -> None:
    """Undo both."""
    replace_norm(total_norm)
    GradScaler._unscale_grads_ = _find
    GradScaler._check_scale_growth_tracker = _check  # noqa: SLF001


def has_scaled(scaler: GradScaler) -> bool:
    """Return whether a scaler has scaled a loss, without which torch refuses to step."""
    return scaler._scale is not None  # noqa: SLF001
