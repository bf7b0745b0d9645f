# SPDX-License-Identifier: Apache-2.0
"""A collective as a step of torch's autograd, and the checks that all of them share. Imported by ``functional``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable


def through(
    data: torch.Tensor,
    *,
    there: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return what ``there`` makes of ``data``; backward does with the gradient what ``back`` does."""
    return cast("torch.Tensor", _Through.apply(data, there, back))


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own class
        data: torch.Tensor,
        there: Callable[[torch.Tensor], torch.Tensor],
        back: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.back = back
        return there(data.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401 - torch's own class
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "A collective has no second derivative: backward(create_graph=True) cannot go through it.",
                do="leave create_graph=True out, or compute the second derivative on one rank",
            )
        return ctx.back(gradients[0]), None, None


def checked_axis(name: str, inp: torch.Tensor, axis: int, *, parts: int = 1) -> int:
    """Return ``axis`` counted from the front.

    Raises:
        ConfigurationError: there is none, or ``parts`` does not divide it.
    """
    if isinstance(axis, bool) or not isinstance(axis, int) or not -inp.ndim <= axis < inp.ndim:
        raise ConfigurationError(
            f"{name} has no axis {axis!r} of a tensor of {inp.ndim} dimensions.",
            evidence=f"the shape is {list(inp.shape)}",
            do="pass one of its dimensions; a scalar needs one first: x.reshape(1)",
        )
    if inp.shape[axis] % parts:
        raise ConfigurationError(
            f"{name} cannot divide axis {axis} of {list(inp.shape)} into {parts} equal parts.",
            do="pad it; or use rankwise.reduce_scatter() or all_to_all(), whose parts may differ",
        )
    return axis % inp.ndim


def refuse_device(name: str, device: str | None) -> None:
    """Raise where a device was named: MegEngine's were streams."""
    if device:
        raise ConfigurationError(
            f"{name} was given device={device!r}: what ranks exchange stays on the device it is on.",
            do="leave device out, and move the result with .to(device)",
        )
