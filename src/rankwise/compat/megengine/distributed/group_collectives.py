# SPDX-License-Identifier: Apache-2.0
"""rankwise's collectives in the order of a MegEngine group, along any axis; and collectives with gradients.

The ranks of a rankwise group ascend; those of a MegEngine group are in the given order. Imported by ``functional``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.comm import collectives
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.compat.megengine.distributed.groups import Group


def through(
    data: torch.Tensor,
    *,
    there: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return ``there(data)``; backward computes the gradient of ``data`` by ``back``."""
    return cast("torch.Tensor", _WithBackward.apply(data, there, back))


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        data: torch.Tensor,
        there: Callable[[torch.Tensor], torch.Tensor],
        back: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.back = back
        return there(data.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "Collectives do not support second derivatives: backward(create_graph=True) cannot pass through them.",
                do="omit create_graph=True, or compute the second derivative on one rank",
            )
        return ctx.back(gradients[0]), None, None


def checked_axis(name: str, inp: torch.Tensor, axis: int, *, parts: int = 1) -> int:
    """Return ``axis`` counted from the front; raise if it is not a dimension, or cannot be divided into ``parts``."""
    if isinstance(axis, bool) or not isinstance(axis, int) or not -inp.ndim <= axis < inp.ndim:
        raise ConfigurationError(
            f"{name} got axis={axis!r} for a tensor of {inp.ndim} dimensions.",
            evidence=f"the shape is {list(inp.shape)}",
            do="pass one of its dimensions; reshape a scalar first: x.reshape(1)",
        )
    if inp.shape[axis] % parts:
        raise ConfigurationError(
            f"{name} cannot divide axis {axis} of {list(inp.shape)} into {parts} equal parts.",
            do="pad it, or use rankwise.reduce_scatter() or all_to_all(), which accept unequal parts",
        )
    return axis % inp.ndim


def refuse_device(name: str, device: str | None) -> None:
    """Raise if a device was passed: MegEngine's devices were streams."""
    if device:
        raise ConfigurationError(
            f"{name} was given device={device!r}, but results stay on the device of the input.",
            do="omit device, and move the result with .to(device)",
        )


def gathered(data: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in the group's order."""
    parts = collectives.all_gather(data, group=group.group)
    return [parts[place] for place in group.places]


def scattered_sum(data: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """Return this rank's part of the sum over ranks, divided along ``axis``."""
    parts = _upwards(data.tensor_split(group.size, axis), group)
    rows = torch.cat([part.movedim(axis, 0) for part in parts])
    return collectives.reduce_scatter(rows, group=group.group).movedim(0, axis)


def exchanged(data: torch.Tensor, group: Group, split_axis: int, concat_axis: int) -> torch.Tensor:
    """Return the parts of all ranks for this one, concatenated along ``concat_axis``."""
    return torch.cat(_to_each(data.tensor_split(group.size, split_axis), group), concat_axis)


def gathered_at_root(data: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """Return the concatenated tensors of all ranks on the root; elsewhere zeros of that shape."""
    nothing = data.new_empty(0)
    received = _to_each([data, *[nothing] * (group.size - 1)], group)
    if group.rank == 0:
        return torch.cat(received, axis)
    shape = list(data.shape)
    shape[axis] *= group.size
    return data.new_zeros(()).expand(shape)


def scattered_from_root(data: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """Return this rank's part of the root's tensor."""
    nothing = data.new_empty(0)
    parts = data.tensor_split(group.size, axis) if group.rank == 0 else [nothing] * group.size
    return _to_each(parts, group)[0]


def _to_each(parts: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Send a part to each rank, and return the parts from each, both in the group's order."""
    received = collectives.all_to_all(_upwards(parts, group), group=group.group)
    return [received[place] for place in group.places]


def _upwards(parts: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Return parts that are in the group's order, in ascending order of ranks."""
    return [part for _, part in sorted(zip(group.proc_ranks, parts, strict=True), key=lambda pair: pair[0])]
