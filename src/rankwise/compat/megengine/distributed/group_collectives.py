# SPDX-License-Identifier: Apache-2.0
"""rankwise's collectives in the order of a MegEngine group, along any axis; equal values and gradients on its ranks.

The ranks of a rankwise group ascend; those of a MegEngine group are in the given order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.comm import collectives
from rankwise.compat.megengine.distributed.groups import WORLD, Group, arguments_of, checked
from rankwise.errors import ConfigurationError
from rankwise.replicate.bucket import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


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


REDUCE_METHODS = ("sum", "mean")


def bcast_list_(inps: Iterable[torch.Tensor], group: Group = WORLD) -> None:
    """Overwrite tensors, in place, with those of the root, for example parameters before a training.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.

    Args:
        inps: tensors, as ``model.parameters()`` gives them.
        group: whose first rank is the root.

    Raises:
        ConfigurationError: something in ``inps`` is not a tensor.
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`rankwise.broadcast`.
    """
    group = checked(group)
    tensors = list(inps)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(
                f"bcast_list_ takes tensors, not {type(tensor).__name__}.",
                do="pass model.parameters() or model.buffers()",
            )
    received = collectives.broadcast([tensor.detach() for tensor in tensors], group.root, group=group.group)
    with torch.no_grad():
        for tensor, value in zip(tensors, received, strict=True):
            tensor.copy_(value)


class AllreduceCallback:
    """Makes a GradManager add up, or average, gradients over ranks. It only holds the options of that.

    Every rank has the same weight, whatever its number of samples. A parameter that a rank did not use counts as zero
    there; one that no rank used keeps ``grad=None``. Gradients are sent in buckets, while backward runs.

    Args:
        reduce_method: ``"sum"`` or ``"mean"``.
        group: the ranks.
        backend: one of MegEngine's names; it has no effect, see ``override_backend``.

    Raises:
        ConfigurationError: ``reduce_method`` or ``backend`` is unknown.
    """

    def __init__(self, reduce_method: str, group: Group = WORLD, backend: str | None = None) -> None:
        if reduce_method.lower() not in REDUCE_METHODS:
            raise ConfigurationError(
                f"Unknown reduce_method {reduce_method!r}.", do="use one of " + ", ".join(REDUCE_METHODS)
            )
        if backend is not None:
            arguments_of(backend)
        self.reduce_method = reduce_method.lower()
        self.group = checked(group)

    def weights(self, num_ranks: int) -> Weights:
        """Return the weight of every rank's gradients, which does not depend on its number of samples."""
        # For a sum, the factor cancels the division by the number of ranks: the bits are those of a plain sum.
        return Weights(float(num_ranks) if self.reduce_method == "sum" else 1.0, 1.0)

    def __call__(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - as callbacks are called
        """Raise: gradients are not reduced one by one.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "The callback of make_allreduce_cb() works only with a GradManager, which reduces many gradients together.",
            do="pass it to gm.attach(model.parameters(), callbacks=[...]); use all_reduce_sum() for one tensor",
        )


make_allreduce_cb = AllreduceCallback
