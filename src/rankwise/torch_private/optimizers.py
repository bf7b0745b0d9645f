# SPDX-License-Identifier: Apache-2.0
"""What a learning rate scheduler looks for on an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def mark_step(optimizer: torch.optim.Optimizer, step: Any) -> None:  # noqa: ANN401 - a function
    """Give ``step``, which replaces the optimizer's, the marks that schedulers look for."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        # A scheduler was built before and has marked the step that it saw.
        step._wrapped_by_lr_sched = True  # noqa: SLF001
    # Schedulers also check that the optimizer has stepped before them, which is not for each rank to know.
    optimizer._opt_called = True  # type: ignore[attr-defined] # noqa: SLF001
