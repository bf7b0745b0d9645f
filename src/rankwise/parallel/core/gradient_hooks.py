# SPDX-License-Identifier: Apache-2.0
"""Hooks that report each gradient as soon as autograd has accumulated it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.utils.hooks import RemovableHandle

T = TypeVar("T")


def call_when_accumulated(
    parameter: torch.Tensor, owner: T, arrived: Callable[[T, int], None], number: int
) -> RemovableHandle:
    """Call ``arrived(owner, number)`` when a backward has added to ``parameter.grad``, as long as ``owner`` lives."""
    # The parameter holds the hook: a hook that held the owner would keep the model's memory for ever.
    followed = weakref.ref(owner)

    def hook(_: torch.Tensor) -> None:
        alive = followed()
        if alive is not None:
            arrived(alive, number)

    return parameter.register_post_accumulate_grad_hook(hook)
