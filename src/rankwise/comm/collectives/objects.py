# SPDX-License-Identifier: Apache-2.0
"""Collectives without tensors: objects by pickle, JSON for rankwise's own messages, and barriers."""

from __future__ import annotations

import json
import operator
import pickle
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rankwise.comm.backends.protocol import NOTE_BYTES
from rankwise.comm.collectives.group import (
    agreed,
    exchange_of,
    rank_in_group,
    ranks_of,
    signed_call,
    source_in_group,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.collectives.group import Group

T = TypeVar("T")

_LENGTH_BYTES = 8
SHORT_BYTES = NOTE_BYTES - _LENGTH_BYTES
"""Data up to this size is gathered in one collective, longer data in two."""


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

    Objects are pickled, and signed: what a rank of this job has not signed is not unpickled.

    Args:
        value: anything that can be pickled.
        group: default: all ranks.

    Raises:
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
        NotSigned: a process that is not a rank of this job has sent or changed an object.
    """
    payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    call = signed_call("all_gather_object()", group)
    received = gather_bytes(exchange_of(group), call.sign(payload), "all_gather_object()")
    objects = [call.load(one, rank) for one, rank in zip(received, ranks_of(group), strict=True)]
    call.end()
    return objects


def broadcast_object(value: T, source: int = 0, *, group: Group | None = None) -> T:
    """Give every rank the picklable object of rank ``source``.

    Called by: every rank of ``group``, in the same order. ``value`` matters on ``source`` only.

    Objects are pickled, and signed: what a rank of this job has not signed is not unpickled.

    Args:
        value: anything that can be pickled.
        source: the rank of the world whose object all receive.
        group: default: all ranks.

    Raises:
        ConfigurationError: rank ``source`` does not exist.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
        NotSigned: a process that is not a rank of this job has sent or changed the object.
    """
    source_rank = source_in_group(group, source, "broadcast_object")
    exchange = agreed(f"broadcast_object(source={source})", group)
    is_source = rank_in_group(group) == source_rank
    call = signed_call("broadcast_object()", group)
    payload = call.sign(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)) if is_source else b""
    if exchange is None:
        return call.load(payload, source)  # type: ignore[no-any-return]
    size = int(exchange.broadcast(torch.tensor([len(payload)]), source_rank, what="broadcast_object(size)"))
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if is_source else torch.empty(size).byte()
    received = exchange.broadcast(data, source_rank, what="broadcast_object(value)")
    loaded = call.load(received.numpy().tobytes(), source)
    call.end()
    return loaded  # type: ignore[no-any-return]


def gather_json(value: object, *, what: str, group: Group | None = None) -> list[Any]:
    """Collect a JSON-able value from every rank, in rank order: for rankwise's own messages between ranks.

    Called by: every rank of ``group``, in the same order.

    Unlike :func:`all_gather_object` it runs no code that another rank has sent.

    Args:
        value: None, booleans, numbers, strings, lists and string-keyed dicts of them; tuples become lists.
        what: the content or the call, in the words that ranks are compared by: ``"rankwise.mesh()"``.
        group: default: all ranks.

    Raises:
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    # A seed or a length may be a NumPy integer.
    payload = json.dumps(value, default=operator.index).encode()
    return list(map(json.loads, gather_bytes(exchange_of(group), payload, what)))


def gather_bytes(exchange: Exchange | None, payload: bytes, what: str) -> list[bytes]:
    """Return the bytes of every rank, which may differ in length.

    Called by: every rank of ``exchange``, of the call ``what``.
    """
    if exchange is None:
        return [payload]
    head = len(payload).to_bytes(_LENGTH_BYTES, "little")
    lengths: list[int] = []
    starts: list[bytes] = []
    for note in exchange.gather_notes(head + payload[:SHORT_BYTES], what):
        lengths.append(int.from_bytes(note[:_LENGTH_BYTES], "little"))
        starts.append(note[_LENGTH_BYTES:][: lengths[-1]])
    if max(lengths) <= SHORT_BYTES:
        return starts
    rest = torch.frombuffer(bytearray(payload), dtype=torch.uint8)[SHORT_BYTES:]
    rests = gather_rows(exchange, rest, [max(0, length - SHORT_BYTES) for length in lengths], what)
    return [b"".join((start, row.numpy().data)) for start, row in zip(starts, rests, strict=True)]


def gather_rows(exchange: Exchange, data: torch.Tensor, sizes: Sequence[int], what: str) -> list[torch.Tensor]:
    """Return the bytes of every rank, in rank order: ``data`` is [n] of this rank, ``sizes`` the n of every rank."""
    padded = data.new_zeros(max(sizes))
    padded[: data.numel()] = data
    rows = exchange.all_gather(padded, what=f"{what}: values")
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]
