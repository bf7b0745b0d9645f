# SPDX-License-Identifier: Apache-2.0
"""The order of the hooks around an optimizer's step, which torch runs in the order of registration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import OrderedDict

    from torch.optim.optimizer import Optimizer
    from torch.utils.hooks import RemovableHandle


def put_innermost(optimizer: Optimizer, before: RemovableHandle, after: RemovableHandle) -> None:
    """Have two hooks of an optimizer run last before its step, and first after it."""
    pre: OrderedDict[int, Any] = optimizer._optimizer_step_pre_hooks  # type: ignore[assignment] # noqa: SLF001
    post: OrderedDict[int, Any] = optimizer._optimizer_step_post_hooks  # type: ignore[assignment] # noqa: SLF001
    pre.move_to_end(before.id)
    post.move_to_end(after.id, last=False)
