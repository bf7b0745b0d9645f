# SPDX-License-Identifier: Apache-2.0
"""Several gradients of one graph, which torch computes at once by vmap: one by one where ranks exchange or record."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import functional

from rankwise.auto.replacing import replaced

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


def one_by_one() -> AbstractContextManager[None]:
    """Compute gradients one by one inside the block, in ``autograd.grad`` and ``autograd.functional``."""
    return replaced((torch.autograd, ["grad"], _without_batches), (functional, ["jacobian"], _without_vmap))


def _without_batches(grad: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(grad)

    @wraps(grad)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        batched = given.pop("grad_outputs", None)
        if not given.pop("is_grads_batched", False) or batched is None:
            return grad(*args, **kwargs)
        batched = [batched] if isinstance(batched, torch.Tensor) else list(batched)
        number = next(len(one) for one in batched if one is not None)
        keeps = given.pop("retain_graph", None)
        keeps = given.get("create_graph", False) if keeps is None else keeps
        found = [
            grad(
                grad_outputs=[None if one is None else one[place] for one in batched],
                retain_graph=keeps or place + 1 < number,
                **given,
            )
            for place in range(number)
        ]
        return tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*found, strict=True))

    return call


def _without_vmap(jacobian: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(jacobian)

    @wraps(jacobian)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        # In forward mode nothing is split.
        if given.get("strategy", "reverse-mode") == "reverse-mode":
            given["vectorize"] = False
        return jacobian(**given)

    return call
