# SPDX-License-Identifier: Apache-2.0
"""A tensor from one rank to another, and its gradient back. Imported by ``functional``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.comm.point_to_point.send_recv import recv, send
from rankwise.compat.megengine.distributed.group_collectives import refuse_device
from rankwise.compat.megengine.recording import keep_beginning, keep_end, recordings
from rankwise.compat.megengine.tensors import dtype_of
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence


def remote_send(inp: torch.Tensor, dest_rank: int) -> None:
    """Send a tensor to another rank, without waiting for it to be received.

    Called by: this rank, once for each ``remote_recv`` from it on ``dest_rank``, in the same order.

    Where ``inp`` requires a gradient, ``gm.backward()`` of the recording GradManager waits for the gradient of
    ``dest_rank`` and goes on from here; it needs no loss on this rank.

    Args:
        inp: any shape and dtype, which travel with it.
        dest_rank: of the world.

    Raises:
        ConfigurationError: ``inp`` requires a gradient, and no GradManager records.
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
    """Return the next tensor that another rank has sent to this one, waiting for it.

    Called by: this rank, once for each ``remote_send`` to it on ``src_rank``, in the same order.

    Args:
        src_rank: of the world.
        device: nothing: what is received is on this rank's device.
        inp: nothing: shape and dtype travel with the tensor.
        shape: of the tensor, which the first versions of MegEngine had to be given; compared with what is received.
        dtype: the same, as torch's or NumPy's dtype or its name.

    Returns:
        The tensor. It requires a gradient where what was sent did; backward then sends its gradient back.

    Raises:
        ConfigurationError: what was received has another shape or dtype.
        ConfigurationError, PeerFailed, PeerMissing: as :func:`rankwise.recv`.
    """
    if device is not None and not isinstance(device, str):
        # MegEngine's first versions had the shape and the dtype there.
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
        # The leaf behind it, which rankwise.recv() made for backward to run through it.
        keep_beginning(cast("Any", received.grad_fn).next_functions[0][0].variable)
    return received


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
