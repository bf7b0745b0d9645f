# SPDX-License-Identifier: Apache-2.0
"""MegEngine's collectives with gradients: backward runs the opposite collective, on every rank of the group.

Every rank's backward must therefore reach each of them, in the same order. Imported by users, also as
``megengine.functional.distributed``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.comm import collectives
from rankwise.comm.point_to_point.send_recv import recv, send
from rankwise.comm.session import current
from rankwise.compat.megengine.distributed.groups import (
    WORLD,
    Group,
    checked,
    checked_axis,
    exchanged,
    gathered,
    gathered_at_root,
    refuse_device,
    scattered_from_root,
    scattered_sum,
    through,
)
from rankwise.compat.megengine.tensors import dtype_of
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "all_gather",
    "all_reduce_max",
    "all_reduce_min",
    "all_reduce_sum",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce_scatter_sum",
    "reduce_sum",
    "remote_recv",
    "remote_send",
    "scatter",
]


@dataclass(eq=False)
class Recording:
    """What backward of one recording GradManager must reach, besides the losses that are passed to it.

    No loss of a rank depends on the tensors it sends, and those it receives depend on no tensor of the rank.
    """

    ends: list[torch.Tensor] = field(default_factory=list)
    """Scalars with the value zero, from which backward starts as from a loss."""
    beginnings: list[torch.Tensor] = field(default_factory=list)
    """Leaves that backward must reach, since its path to them communicates."""


recordings: list[Recording] = []
"""The active ones of this process."""


def keep_end(zero: torch.Tensor) -> None:
    """Make backward start from ``zero`` too."""
    if zero.requires_grad:
        for recording in recordings:
            recording.ends.append(zero)


def keep_beginning(leaf: torch.Tensor) -> None:
    """Make backward reach ``leaf`` too."""
    if leaf.requires_grad:
        for recording in recordings:
            recording.beginnings.append(leaf)


def reduce_sum(inp: torch.Tensor, group: Group = WORLD, device: str | None = None) -> torch.Tensor | None:
    """Add up over ranks, for the root only.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.

    Args:
        inp: any shape.
        group: whose first rank is the root.
        device: not used: results are on the device of ``inp``.

    Returns:
        The sum on the root, ``None`` elsewhere. Backward of a recording GradManager gives every rank the root's
        gradient; without one, the sum has no gradient.

    Raises:
        CollectiveMismatch: shapes or dtypes differ.
        PeerFailed, PeerMissing: a rank failed, left, or did not call it in time.
    """
    group = _checked("reduce_sum", inp, group, device)
    total = through(
        inp,
        there=lambda data: collectives.all_reduce(data, group=group.group),
        back=lambda gradient: collectives.broadcast(gradient, group.root, group=group.group),
    )
    return _for_the_root(total, group)


def broadcast(inp: torch.Tensor | None, group: Group = WORLD, device: str | None = None) -> torch.Tensor:
    """Give every rank the root's tensor.

    Called by: every rank of ``group``, in the same order.

    Args:
        inp: any shape; used on the root only.
        group: whose first rank is the root.
        device: not used.

    Returns:
        The root's tensor, on every rank. Backward adds the gradients up, for the root.

    Raises:
        PeerFailed, PeerMissing: as :func:`reduce_sum`.
    """
    group, data = _from_the_root("broadcast", inp, group, device)
    return through(
        data,
        there=lambda given: collectives.broadcast(given, group.root, group=group.group),
        back=lambda gradient: collectives.all_reduce(gradient, group=group.group),
    )


def all_gather(inp: torch.Tensor, group: Group = WORLD, device: str | None = None, axis: int = 0) -> torch.Tensor:
    """Concatenate the tensors of all ranks.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.

    Args:
        inp: one dimension or more.
        group: determines their order.
        device: not used.
        axis: the dimension to concatenate along.

    Returns:
        Shape of ``inp``, ``axis`` times the number of ranks. Backward gives each rank the sum of its part's gradients.

    Raises:
        ConfigurationError: ``axis`` is not a dimension of ``inp``.
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`reduce_sum`.
    """
    group, axis = _checked("all_gather", inp, group, device), checked_axis("all_gather", inp, axis)
    return through(
        inp,
        there=lambda data: torch.cat(gathered(data, group), axis),
        back=lambda gradient: scattered_sum(gradient, group, axis),
    )


def reduce_scatter_sum(
    inp: torch.Tensor, group: Group = WORLD, device: str | None = None, axis: int = 0
) -> torch.Tensor:
    """Add up over ranks, and give each rank its part.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.

    Args:
        inp: one dimension or more.
        group: determines the order of the parts.
        device: not used.
        axis: the dimension that is divided; the number of ranks must divide it.

    Returns:
        Shape of ``inp``, ``axis`` divided by the number of ranks. Backward concatenates the gradients.

    Raises:
        ConfigurationError: ``axis`` cannot be divided, or is not a dimension of ``inp``.
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`reduce_sum`.
    """
    group = _checked("reduce_scatter_sum", inp, group, device)
    axis = checked_axis("reduce_scatter_sum", inp, axis, parts=group.size)
    return through(
        inp,
        there=lambda data: scattered_sum(data, group, axis),
        back=lambda gradient: torch.cat(gathered(gradient, group), axis),
    )


def all_reduce_sum(inp: torch.Tensor, group: Group = WORLD, device: str | None = None) -> torch.Tensor:
    """Add up over ranks, for all of them.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.

    Args:
        inp: any shape.
        group: the ranks.
        device: not used.

    Returns:
        The sum. Backward adds the gradients of all ranks up.

    Raises:
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`reduce_sum`.
    """
    group = _checked("all_reduce_sum", inp, group, device)

    def total(data: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(data, group=group.group)

    return through(inp, there=total, back=total)


def all_reduce_max(inp: torch.Tensor, group: Group = WORLD, device: str | None = None) -> torch.Tensor:
    """Take the largest over ranks, element by element.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.

    Args:
        inp: any shape.
        group: the ranks.
        device: not used.

    Returns:
        The largest. Backward adds the gradients of all ranks up, and gives them to every rank that holds the largest.

    Raises:
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`reduce_sum`.
    """
    return _extreme("max", inp, _checked("all_reduce_max", inp, group, device))


def all_reduce_min(inp: torch.Tensor, group: Group = WORLD, device: str | None = None) -> torch.Tensor:
    """Take the smallest over ranks, element by element. Everything else as :func:`all_reduce_max`.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.
    """
    return _extreme("min", inp, _checked("all_reduce_min", inp, group, device))


def gather(inp: torch.Tensor, group: Group = WORLD, device: str | None = None, axis: int = 0) -> torch.Tensor | None:
    """Concatenate the tensors of all ranks, on the root only.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.

    Args:
        inp: one dimension or more.
        group: determines their order; its first rank is the root.
        device: not used.
        axis: the dimension to concatenate along.

    Returns:
        As :func:`all_gather` on the root, ``None`` elsewhere. Backward of a recording GradManager gives each rank its
        part of the root's gradient; without one, there is no gradient.

    Raises:
        ConfigurationError, PeerFailed, PeerMissing: as :func:`all_gather`.
    """
    group, axis = _checked("gather", inp, group, device), checked_axis("gather", inp, axis)
    return _for_the_root(
        through(
            inp,
            there=lambda data: gathered_at_root(data, group, axis),
            back=lambda gradient: scattered_from_root(gradient, group, axis),
        ),
        group,
    )


def scatter(inp: torch.Tensor | None, group: Group = WORLD, device: str | None = None, axis: int = 0) -> torch.Tensor:
    """Give each rank its part of the root's tensor.

    Called by: every rank of ``group``, in the same order.

    Args:
        inp: one dimension or more; used on the root only.
        group: determines the order of the parts; its first rank is the root.
        device: not used.
        axis: the dimension that is divided; the number of ranks must divide it.

    Returns:
        The part of this rank. Backward concatenates the gradients, on the root.

    Raises:
        ConfigurationError: ``axis`` cannot be divided, or is not a dimension of the root's tensor; on every rank.
        PeerFailed, PeerMissing: as :func:`reduce_sum`.
    """
    group, data = _from_the_root("scatter", inp, group, device)
    axis = checked_axis("scatter", data, axis, parts=group.size)
    return through(
        data,
        there=lambda given: scattered_from_root(given, group, axis),
        back=lambda gradient: gathered_at_root(gradient, group, axis),
    )


def all_to_all(
    inp: torch.Tensor,
    group: Group = WORLD,
    device: str | None = None,
    split_axis: int = 0,
    concat_axis: int = 0,
) -> torch.Tensor:
    """Send a part to each rank, and concatenate the parts from each.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.

    Args:
        inp: one dimension or more.
        group: determines the order of the parts.
        device: not used.
        split_axis: the dimension that is divided; the number of ranks must divide it.
        concat_axis: the dimension to concatenate along.

    Returns:
        Shape of ``inp``, ``split_axis`` divided by the number of ranks and ``concat_axis`` times it. Backward sends the
        gradients back to the ranks of the values.

    Raises:
        ConfigurationError: ``split_axis`` cannot be divided, or an axis is not a dimension of ``inp``.
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`reduce_sum`.
    """
    group = _checked("all_to_all", inp, group, device)
    split_axis = checked_axis("all_to_all", inp, split_axis, parts=group.size)
    concat_axis = checked_axis("all_to_all", inp, concat_axis)
    return through(
        inp,
        there=lambda data: exchanged(data, group, split_axis, concat_axis),
        back=lambda gradient: exchanged(gradient, group, concat_axis, split_axis),
    )


def remote_send(inp: torch.Tensor, dest_rank: int) -> None:
    """Send a tensor to another rank, without waiting for it to be received.

    Called by: this rank, once for each ``remote_recv`` from it on ``dest_rank``, in the same order.

    Where ``inp`` requires a gradient, ``gm.backward()`` of the recording GradManager waits for the gradient of
    ``dest_rank`` and continues from here; this rank needs no loss.

    Args:
        inp: any shape and dtype, which are sent with it.
        dest_rank: of the world.

    Raises:
        ConfigurationError: ``inp`` requires a gradient, and no GradManager is recording.
        ConfigurationError, PeerFailed, PeerMissing: as :func:`rankwise.send`.
    """
    if inp.requires_grad and torch.is_grad_enabled() and not recordings:
        raise ConfigurationError(
            "remote_send was given a tensor that requires a gradient, but no GradManager is recording.",
            do="call it within `with gm:`, then gm.backward(); send x.detach() if no gradient is needed; without a "
            "GradManager write rankwise.send(x, to=...).backward()",
        )
    keep_end(send(inp, dest_rank))


def remote_recv(
    src_rank: int,
    device: str | None = None,
    inp: torch.Tensor | None = None,
    *,
    shape: Sequence[int] | None = None,
    dtype: object = None,
) -> torch.Tensor:
    """Wait for the next tensor that another rank sends to this one, and return it.

    Called by: this rank, once for each ``remote_send`` to it on ``src_rank``, in the same order.

    Args:
        src_rank: of the world.
        device: not used: the tensor is on this rank's device.
        inp: not used: shape and dtype are sent with the tensor.
        shape: of the tensor, which the first versions of MegEngine required; compared with the received one.
        dtype: the same, as torch's or NumPy's dtype or its name.

    Returns:
        The tensor. It requires a gradient if the sent one did; backward then sends its gradient back.

    Raises:
        ConfigurationError: the received tensor has another shape or dtype.
        ConfigurationError, PeerFailed, PeerMissing: as :func:`rankwise.recv`.
    """
    if device is not None and not isinstance(device, str):
        # In MegEngine's first versions the shape and the dtype came here.
        raise ConfigurationError(
            f"remote_recv does not accept device={device!r}.",
            do="omit it: shape and dtype are sent with the tensor; or pass them by keyword: shape=, dtype=",
        )
    wanted = None if dtype is None else dtype_of(dtype)
    refuse_device("remote_recv", device)
    _ = inp
    received = cast("torch.Tensor", recv(src_rank))
    _check_received(received, src_rank, shape, wanted)
    if received.grad_fn is not None:
        # The leaf before it, which rankwise.recv() created so that backward runs through it.
        keep_beginning(cast("Any", received.grad_fn).next_functions[0][0].variable)
    return received


def _extreme(op: str, inp: torch.Tensor, group: Group) -> torch.Tensor:
    kept: list[torch.Tensor] = []

    def there(data: torch.Tensor) -> torch.Tensor:
        extreme = collectives.all_reduce(data, op, group=group.group)
        kept.append(data == extreme)
        return extreme

    def back(gradient: torch.Tensor) -> torch.Tensor:
        total = collectives.all_reduce(gradient, group=group.group)
        return total.where(kept[0], total.new_zeros(()))

    return through(inp, there=there, back=back)


def _for_the_root(out: torch.Tensor, group: Group) -> torch.Tensor | None:
    # Backward must reach it on every rank, including those that do not use the result.
    if recordings:
        keep_end((out if out.ndim else out.reshape(1)).narrow(0, 0, 0).sum())
    else:
        out = out.detach()
    return out if group.rank == 0 else None


def _from_the_root(name: str, inp: torch.Tensor | None, group: Group, device: str | None) -> tuple[Group, torch.Tensor]:
    """Return the root's tensor on the root, and an empty one of the same shape and dtype on other ranks."""
    group = checked(group)
    is_root = group.rank == 0
    refuse_device(name, device)
    reported: list[Any] | None = None
    if is_root and isinstance(inp, torch.Tensor):
        wants_gradient = inp.requires_grad and torch.is_grad_enabled()
        reported = [str(inp.dtype).removeprefix("torch."), list(inp.shape), wants_gradient]
    kind = collectives.gather_json(reported, what=f"{name}: kind", group=group.group)[group.places[0]]
    if kind is None:
        raise ConfigurationError(
            f"{name} requires a tensor on rank {group.root}, got None.", do=f"pass a tensor on rank {group.root}"
        )
    if is_root:
        return group, cast("torch.Tensor", inp)
    dtype, shape, wants_gradient = kind
    data = torch.empty(shape, dtype=getattr(torch, dtype), device=current().world.device)
    data.requires_grad_(bool(wants_gradient))
    keep_beginning(data)
    return group, data


def _checked(name: str, inp: object, group: Group, device: str | None) -> Group:
    if not isinstance(inp, torch.Tensor):
        raise ConfigurationError(
            f"{name} takes a tensor, not {type(inp).__name__}.",
            do="pass a torch.Tensor; rankwise's own collectives take NumPy arrays and trees too",
        )
    refuse_device(name, device)
    return checked(group)


def _check_received(
    received: torch.Tensor, src_rank: int, shape: Sequence[int] | None, dtype: torch.dtype | None
) -> None:
    if (shape is None or tuple(shape) == tuple(received.shape)) and dtype in {None, received.dtype}:
        return
    expected = {"shape": None if shape is None else list(shape), "dtype": dtype}
    raise ConfigurationError(
        f"remote_recv expected a different tensor than rank {src_rank} sent.",
        evidence="; ".join(
            [
                "expected: " + ", ".join(f"{name}={value}" for name, value in expected.items() if value is not None),
                f"received: shape={list(received.shape)}, dtype={received.dtype}",
            ]
        ),
        do="pass the sender's shape and dtype, or omit shape= and dtype=",
    )
