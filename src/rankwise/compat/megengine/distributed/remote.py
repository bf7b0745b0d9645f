# SPDX-License-Identifier: Apache-2.0
"""A tensor from one rank to another, and its gradient back. Imported by ``functional``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rankwise.compat.megengine.distributed.through import refuse_device
from rankwise.compat.megengine.kept import keep_beginning, keep_end
from rankwise.point_to_point.calls import recv, send

if TYPE_CHECKING:
    import torch


def remote_send(inp: torch.Tensor, dest_rank: int) -> None:
    """Send a tensor to another rank, without waiting for it to be received.

    Called by: this rank, once for each ``remote_recv`` from it on ``dest_rank``, in the same order.

    Where ``inp`` requires a gradient, ``gm.backward()`` of the recording GradManager waits for the gradient of
    ``dest_rank`` and goes on from here; it needs no loss on this rank. Without a GradManager there is
    :func:`rankwise.send`, whose result has a ``backward()``.

    Args:
        inp: any shape and dtype, which travel with it.
        dest_rank: of the world.

    Raises:
        ConfigurationError, PeerFailed, PeerMissing: as :func:`rankwise.send`.
    """
    keep_end(send(inp, dest_rank))


def remote_recv(src_rank: int, device: str | None = None, inp: torch.Tensor | None = None) -> torch.Tensor:
    """Return the next tensor that another rank has sent to this one, waiting for it.

    Called by: this rank, once for each ``remote_send`` to it on ``src_rank``, in the same order.

    Args:
        src_rank: of the world.
        device: nothing: what is received is on this rank's device.
        inp: nothing: shape and dtype travel with the tensor.

    Returns:
        The tensor. It requires a gradient where what was sent did; backward then sends its gradient back.

    Raises:
        ConfigurationError, PeerFailed, PeerMissing: as :func:`rankwise.recv`.
    """
    refuse_device("remote_recv", device)
    _ = inp
    received = cast("torch.Tensor", recv(src_rank))
    if received.grad_fn is not None:
        # The leaf behind it, which rankwise.recv() made for backward to run through it.
        keep_beginning(cast("Any", received.grad_fn).next_functions[0][0].variable)
    return received
