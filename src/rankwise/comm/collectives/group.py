# SPDX-License-Identifier: Apache-2.0
"""Opening groups of some of the ranks, and messages of rankwise between the ranks of one."""

from __future__ import annotations

import json
import operator
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.backends.protocol import NOTE_BYTES
from rankwise.comm.session import Group, current, exchange_of
from rankwise.errors import ConfigurationError, fold_ranks, fold_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Exchange


_LENGTH_BYTES = 8
SHORT_BYTES = NOTE_BYTES - _LENGTH_BYTES
"""Data up to this size is gathered in one collective, longer data in two."""


def new_group(ranks: Sequence[int]) -> Group:
    """Return a group of some of the ranks, for the ``group=`` of collectives.

    Called by: every rank of the world, with the same list, including ranks that are not in it.

    Collectives of a group are called by its ranks only, in the same order among them; relative to those of other groups
    they need no order, even of groups of the same ranks: give each thread its own. For groups along the axes of a model
    there is :func:`rankwise.mesh`.

    Args:
        ranks: of the world, each once, in any order.

    Returns:
        The group; its ``ranks`` ascend, as in torch's groups.

    Raises:
        ConfigurationError: no ranks, a rank that does not exist or occurs twice; or the list differs between ranks.

    Source: torch.distributed.new_group.
    """
    session = current()
    world = session.world
    try:
        given = [operator.index(rank) for rank in ranks]
    except TypeError as error:
        raise ConfigurationError(
            f"rankwise.new_group() takes a list of ranks, got {ranks!r}.", do="rankwise.new_group([0, 2])"
        ) from error
    gathered = gather_json(given, what="rankwise.new_group()")
    if any(sorted(other) != sorted(given) for other in gathered):
        raise ConfigurationError(
            "The argument of rankwise.new_group() differs between ranks.",
            where=f"reported on {world}",
            evidence=fold_values(dict(enumerate(gathered))),
            do="call it with the same list on every rank, including those outside the group",
        )
    members = tuple(sorted(set(given)))
    if not members or len(members) < len(given) or members[0] < 0 or members[-1] >= world.world_size:
        raise ConfigurationError(
            f"new_group({given}): a group is one or more of this job's ranks, each once.",
            evidence=f"this job has only {fold_ranks(range(world.world_size))}",
            do="pass one or more of these, each once",
        )
    own = members.index(world.rank) if world.rank in members else None
    return Group(members, own, session.number_group(), session, _exchange(members))


def _exchange(members: tuple[int, ...]) -> Exchange | None:
    session = current()
    if session.exchange is None or len(members) == 1:
        return None
    if len(members) == session.world.world_size:
        own = session.exchange.dup()
    else:
        others = [rank for rank in range(session.world.world_size) if rank not in members]
        own = session.exchange.split([list(members), others])
    session.parts["group", str(len(session.parts))] = own
    return own


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
