# SPDX-License-Identifier: Apache-2.0
"""A subset of the ranks, as a value, and the exchange for its collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankwise.comm.collectives.signed import SignedCall
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, NotJoined, fold_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session


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


def exchange_of(group: Group | None) -> Exchange | None:
    """Return the exchange of a group, of all ranks by default; ``None`` for a rank that is alone.

    Raises:
        ConfigurationError: this rank is not in the group, or it is not a group of rankwise.
        NotJoined: the group belongs to a world that has been left.
    """
    session = current()
    if group is None:
        return session.exchange
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
    return group._exchange  # noqa: SLF001 - its own module


def size_of(group: Group | None) -> int:
    """Return the number of ranks of a group."""
    return current().world.world_size if group is None else group.size


def ranks_of(group: Group | None) -> Sequence[int]:
    """Return the ranks of a group, as numbers in the world."""
    return range(current().world.world_size) if group is None else group.ranks


def rank_in_group(group: Group | None) -> int:
    """Return this rank's number in a group that it is in."""
    own = current().world.rank if group is None else group.rank
    if own is None:
        raise ConfigurationError(f"This rank is not in {group}.")
    return own


def signed_call(what: str, group: Group | None) -> SignedCall:
    """Return the next call of an object collective of a group."""
    return SignedCall(what, ranks_of(group), 0 if group is None else group.number)


def source_in_group(group: Group | None, source: int, name: str) -> int:
    """Return the number within a group of the world rank that ``name`` takes a value from.

    Raises:
        ConfigurationError: the group has no such rank; or as :func:`exchange_of`.
    """
    exchange_of(group)
    ranks = ranks_of(group)
    if isinstance(source, bool) or not hasattr(source, "__index__") or source not in ranks:
        raise ConfigurationError(
            f"{name} has no source rank {source!r}.",
            evidence=f"the ranks are {ranks.start} to {ranks.stop - 1}"
            if isinstance(ranks, range)
            else f"{group} was given",
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
