# SPDX-License-Identifier: Apache-2.0
"""Gradients of earlier steps, kept out of the reduction of this step: they are exact already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

Earlier = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, each with the gradient that it had."""


def set_aside(tensors: Iterable[torch.Tensor]) -> Earlier:
    """Clear ``grad`` and return copies of what it held."""
    # Its memory may be a channel's, which the next reduction overwrites.
    earlier = [(tensor, tensor.grad.detach().clone()) for tensor in tensors if tensor.grad is not None]
    for tensor, _ in earlier:
        tensor.grad = None
    return earlier


@torch.no_grad()
def add_back(earlier: Earlier) -> None:
    """Add to ``grad`` what was set aside."""
    for tensor, gradient in earlier:
        tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)


def restore(tensors: Iterable[torch.Tensor], earlier: Earlier) -> None:
    """Put back what was set aside, in place of what a step that failed has left."""
    for tensor in tensors:
        tensor.grad = None
    for tensor, gradient in earlier:
        tensor.grad = gradient
