# SPDX-License-Identifier: Apache-2.0
"""What is no tensor: objects by pickle, JSON for what rankwise itself tells between ranks, and meeting."""

from __future__ import annotations

import json
import operator
import pickle
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rankwise.comm.collectives.group import agreed, rank_in_group, source_in_group

if TYPE_CHECKING:
    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.collectives.group import Group

T = TypeVar("T")


def barrier(*, group: Group | None = None) -> None:
    """Return when every rank has called it.

    Called by: every rank of ``group``, in the same order.

    Args:
        group: default: all ranks.

    Raises:
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`; the missing ranks are named.
    """
    agreed("barrier()", group, sends=False)


def all_gather_object(value: T, *, group: Group | None = None) -> list[T]:
    """Collect a picklable object of every rank, in rank order; objects may differ in type and size.

    Called by: every rank of ``group``, in the same order.

    The ranks of a job trust each other: objects are pickled.

    Args:
        value: anything that can be pickled.
        group: default: all ranks.

    Raises:
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    exchange = agreed("all_gather_object()", group)
    return [
        pickle.loads(one)  # noqa: S301 - from a rank of this job
        for one in gather_bytes(exchange, payload, "all_gather_object")
    ]


def broadcast_object(value: T, source: int = 0, *, group: Group | None = None) -> T:
    """Give every rank the picklable object of rank ``source``.

    Called by: every rank of ``group``, in the same order. ``value`` counts on ``source`` only.

    The ranks of a job trust each other: objects are pickled.

    Args:
        value: anything that can be pickled.
        source: the rank of the world whose object all receive.
        group: default: all ranks.

    Raises:
        ConfigurationError: there is no rank ``source``.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    source_rank = source_in_group(group, source, "broadcast_object")
    exchange = agreed(f"broadcast_object(source={source})", group)
    is_source = rank_in_group(group) == source_rank
    payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL) if is_source else b""
    if exchange is None:
        return pickle.loads(payload)  # type: ignore[no-any-return] # noqa: S301 - our own bytes
    size = int(exchange.broadcast(torch.tensor([len(payload)]), source_rank, what="broadcast_object(size)"))
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if is_source else torch.empty(size).byte()
    received = exchange.broadcast(data, source_rank, what="broadcast_object(value)")
    return pickle.loads(received.numpy().tobytes())  # type: ignore[no-any-return] # noqa: S301 - from a rank of this job


def gather_json(value: object, *, what: str, group: Group | None = None) -> list[Any]:
    """Collect what JSON can say from every rank, in rank order: what rankwise itself tells between ranks.

    Called by: every rank of ``group``, in the same order.

    Unlike :func:`all_gather_object` it runs nothing that another rank has sent.

    Args:
        value: None, booleans, numbers, texts, lists and text-keyed dicts of them; tuples become lists.
        what: is told, or by which call, in the words that ranks are compared by: ``"rankwise.mesh()"``.
        group: default: all ranks.

    Raises:
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    # A seed or a length may be an integer of NumPy's.
    payload = json.dumps(value, default=operator.index).encode()
    return [json.loads(one) for one in gather_bytes(agreed(what, group), payload, what)]


def gather_bytes(exchange: Exchange | None, payload: bytes, name: str) -> list[bytes]:
    """Return the bytes of every rank, which may differ in length."""
    if exchange is None:
        return [payload]
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = gather_rows(exchange, data, name)
    return [row.numpy().tobytes() for row in rows]


def gather_rows(exchange: Exchange, data: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Return the [n] bytes of every rank, whose n may differ."""
    sizes = exchange.all_gather(torch.tensor([data.numel()]), what=f"{name}: sizes").flatten()
    padded = data.new_zeros(int(sizes.max()))
    padded[: data.numel()] = data
    rows = exchange.all_gather(padded, what=f"{name}: values")
    return [row[:size] for row, size in zip(rows, sizes.tolist(), strict=True)]
