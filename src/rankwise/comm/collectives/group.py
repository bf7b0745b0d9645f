# SPDX-License-Identifier: Apache-2.0
"""Subsets of the ranks, as values; the exchange for their collectives, and messages of rankwise between their ranks."""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.backends.protocol import NOTE_BYTES
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, NotJoined, fold_ranks, fold_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session


_LENGTH_BYTES = 8
SHORT_BYTES = NOTE_BYTES - _LENGTH_BYTES
"""Data up to this size is gathered in one collective, longer data in two."""


@dataclass(frozen=True, eq=False)
class Group:
    """A subset of the ranks, from :func:`rankwise.new_group`: ``group=`` of the collectives."""

    ranks: tuple[int, ...]
    """Their numbers in the world, ascending."""
    rank: int | None
    """This rank's place among them; ``None`` outside."""
    number: int
    """Which one of the groups of this world, in the order of their creation."""
    _session: Session = field(repr=False)
    _exchange: Exchange | None = field(repr=False)

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    def __str__(self) -> str:
        return f"the group of {fold_ranks(self.ranks)}"


def group_of(group: Group | None) -> Group:
    """Return a group that this rank is in: all ranks by default.

    Raises:
        ConfigurationError: this rank is not in the group, or it is not a group of rankwise.
        NotJoined: the group belongs to a world that has been left.
    """
    session = current()
    if group is None:
        world = session.world
        return Group(tuple(range(world.world_size)), world.rank, 0, session, session.exchange)
    if not isinstance(group, Group):
        raise ConfigurationError(
            f"group= must be a group from rankwise.new_group(), got {type(group).__name__}.",
            do="group = rankwise.new_group(ranks), called on every rank",
        )
    if group._session is not session:  # noqa: SLF001 - its own module
        raise NotJoined(
            f"{group} belongs to a world that has been left.",
            do="call rankwise.new_group() again after rankwise.join()",
        )
    if group.rank is None:
        raise ConfigurationError(
            f"Rank {session.world.rank} is not in {group}.",
            where=str(session.world),
            do="call its collectives on its ranks only: `if group.rank is not None:`",
        )
    return group


def exchange_of(group: Group | None) -> Exchange | None:
    """Return the exchange of a group; ``None`` for a rank that is alone. Raises as :func:`group_of`."""
    return current().exchange if group is None else group_of(group)._exchange  # noqa: SLF001 - its own module


def rank_in_group(group: Group | None) -> int:
    """Return this rank's number in a group that it is in."""
    return group_of(group).ranks.index(current().world.rank)


def source_in_group(group: Group | None, source: int, name: str) -> int:
    """Return the number within a group of the world rank that ``name`` takes a value from.

    Raises:
        ConfigurationError: the group has no such rank; or as :func:`group_of`.
    """
    ranks = group_of(group).ranks
    if isinstance(source, bool) or not hasattr(source, "__index__") or source not in ranks:
        raise ConfigurationError(
            f"{name} has no source rank {source!r}.",
            evidence=f"the ranks are 0 to {ranks[-1]}" if group is None else f"{group} was given",
            do="pass source= one of them",
        )
    return ranks.index(source)


def agreed(what: str, group: Group | None, *, sends: bool = True) -> Exchange | None:
    """Check that every rank of the group makes the same call; return the exchange for it."""
    exchange = current().exchange if group is None else exchange_of(group)
    if exchange is not None:
        if sends:
            exchange.agree(what)
        else:
            exchange.barrier(what)
    return exchange


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
            f"rankwise.new_group() cannot have {given}.",
            evidence=f"the ranks are 0 to {world.world_size - 1}",
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
