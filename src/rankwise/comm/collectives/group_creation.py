# SPDX-License-Identifier: Apache-2.0
"""Creating groups of ranks."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from rankwise.comm.collectives.group import Group
from rankwise.comm.collectives.objects import gather_json
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, fold_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Exchange


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
