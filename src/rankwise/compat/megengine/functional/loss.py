# SPDX-License-Identifier: Apache-2.0
"""``megengine.functional.loss``: the loss of the tutorial of distributed training. The others are torch's."""

from __future__ import annotations

import torch

from rankwise.compat.megengine.alias import refusing
from rankwise.errors import ConfigurationError

__all__ = ["cross_entropy"]


def cross_entropy(  # noqa: PLR0917 - as MegEngine has it
    pred: torch.Tensor,
    label: torch.Tensor,
    axis: int = 1,
    with_logits: bool = True,  # noqa: FBT001, FBT002 - as MegEngine has it
    label_smooth: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the cross entropy of classes, on torch's.

    Args:
        pred: logits, with the classes along ``axis``.
        label: the class of each sample, integers of any size: shape of ``pred`` without ``axis``.
        axis: of the classes.
        with_logits: must be true.
        label_smooth: share of each label that is spread over all classes.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Raises:
        ConfigurationError: ``with_logits`` is false.
    """
    if not with_logits:
        raise ConfigurationError(
            "cross_entropy(with_logits=False) is not offered here.",
            do="use torch.nn.functional.nll_loss(pred.log(), label)",
        )
    return torch.nn.functional.cross_entropy(
        pred.movedim(axis, 1), label.long(), reduction=reduction, label_smoothing=label_smooth
    )


__getattr__ = refusing("megengine.functional.loss", __all__, "torch.nn.functional")
