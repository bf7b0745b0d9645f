# SPDX-License-Identifier: Apache-2.0
"""The outer optimizer: how the mean of the worker groups' changes is applied to the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rankwise.errors import ConfigurationError
from rankwise.torch_private.tensors import foreach_add_, foreach_mul_, foreach_sub_

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class DiLoCo:
    """The mean change of a round is a gradient, with which an outer SGD with Nesterov's momentum takes one step.

    The inner optimizer is the one of the training loop; AdamW in the paper.

    Args:
        lr: of the outer step. 1 without momentum is the plain mean.
        momentum: at least 0, below 1.

    Raises:
        ConfigurationError: a value is outside these bounds.

    Source: Douillard et al., "DiLoCo" (arXiv:2311.08105), algorithm 1, with its values for ``lr`` and ``momentum``;
        torch.optim.SGD(nesterov=True) for the step.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        for name, value in (("lr", self.lr), ("momentum", self.momentum)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigurationError(
                    f"{name} of DiLoCo must be a number, got {value!r}.", do=f"pass a number: DiLoCo({name}=...)"
                )
        if not 0.0 < self.lr < float("inf"):
            raise ConfigurationError(
                f"lr of DiLoCo must be above 0, got {self.lr}.", do="pass lr=0.7, the value of the paper"
            )
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigurationError(
                f"momentum of DiLoCo must be at least 0 and below 1, got {self.momentum}.",
                do="pass momentum=0.9, the value of the paper",
            )


MEAN = "mean"


def outer_of(outer: object) -> DiLoCo | None:
    """Return the optimizer that ``outer=`` names; ``None`` for the plain mean.

    Raises:
        ConfigurationError: there is no such optimizer; the error lists the known ones.
    """
    if isinstance(outer, DiLoCo):
        return outer
    if isinstance(outer, str) and outer in {MEAN, "diloco"}:
        return None if outer == MEAN else DiLoCo()
    raise ConfigurationError(
        f"Unknown outer={outer!r} of local_sgd().",
        do='pass outer="mean", "diloco" or rankwise.DiLoCo(lr=..., momentum=...)',
    )


@torch.no_grad()
def step_outer(
    outer: DiLoCo | None,
    anchors: Sequence[torch.Tensor],
    changes: Sequence[torch.Tensor],
    momentum: Sequence[torch.Tensor],
) -> None:
    """Move ``anchors``, the parameters at the start of a round, by one outer step, in place.

    Args:
        outer: ``None`` for the plain mean.
        anchors: see above.
        changes: the mean of what the worker groups subtracted from them.
        momentum: of earlier rounds, updated in place; empty if there is none.
    """
    if not anchors:
        return
    if outer is None:
        foreach_sub_(list(anchors), list(changes))
        return
    if momentum:
        foreach_mul_(list(momentum), outer.momentum)
        foreach_add_(list(momentum), list(changes))
        foreach_add_(list(anchors), list(momentum), alpha=-outer.lr * outer.momentum)
    foreach_add_(list(anchors), list(changes), alpha=-outer.lr)
