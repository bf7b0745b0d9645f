# SPDX-License-Identifier: Apache-2.0
"""``megengine.optimizer``: torch's optimizers, whose ``step()`` returns the optimizer, for ``.clear_grad()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, cast

import torch

from rankwise.compat.megengine.alias import refusing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["SGD", "Adam", "AdamW"]


class _Chained(torch.optim.Optimizer):
    """The methods that only MegEngine's optimizers have. The first base of each class below."""

    def step(self, closure: Callable[[], Any] | None = None) -> Self:  # type: ignore[override]
        """Update the parameters from their gradients, and return this optimizer."""
        bound = cast("Any", super().step)
        own = bound.__func__
        # torch runs hooks around the step of this class, and around that of its base too if an optimizer of the base
        # was created before. They must run once, so the step within is called.
        if getattr(own, "hooked", False):
            own = own.__wrapped__
        own(self, closure)
        return self

    def clear_grad(self) -> None:
        """Set every gradient to ``None``."""
        self.zero_grad(set_to_none=True)


class SGD(_Chained, torch.optim.SGD):
    """torch.optim.SGD with MegEngine's arguments; the updates are the same.

    Args:
        params: parameters, or parameter groups as in torch.
        lr: learning rate.
        momentum: of the velocity, which is ``momentum * velocity + gradient``.
        nesterov: whether to use Nesterov's momentum.
        weight_decay: the parameter is multiplied by it and added to the gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)


class Adam(_Chained, torch.optim.Adam):
    """torch.optim.Adam with MegEngine's arguments; the updates are the same."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class AdamW(_Chained, torch.optim.AdamW):
    """torch.optim.AdamW with MegEngine's arguments; the updates are the same."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


_NOT_OFFERED = {
    "Adadelta": "torch.optim.Adadelta; opt.step().clear_grad() becomes opt.step(); opt.zero_grad()",
    "Adagrad": "torch.optim.Adagrad, which adds eps outside of the root; opt.step(); opt.zero_grad()",
    "LRScheduler": "torch.optim.lr_scheduler.LRScheduler",
    "MultiStepLR": "torch.optim.lr_scheduler.MultiStepLR(opt, milestones, gamma)",
    "Optimizer": "torch.optim.Optimizer",
    "clip_grad_norm": "torch.nn.utils.clip_grad_norm_",
    "clip_grad_value": "torch.nn.utils.clip_grad_value_",
}

__getattr__ = refusing("megengine.optimizer", __all__, _NOT_OFFERED.get)
