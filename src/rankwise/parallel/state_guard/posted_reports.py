# SPDX-License-Identifier: Apache-2.0
"""Reports of the ranks that hold copies of a model, compared by the last rank to post one: no rank waits for another.

Used by without_backward and used_settings.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.session import current

if TYPE_CHECKING:
    from rankwise.comm.backends.protocol import Exchange
    from rankwise.store.values import Store

ANSWER_SECONDS = 10.0
"""How long the store may take to return a key that is set."""


class PostedReports:
    """What the ranks with a copy of one model post."""

    def __init__(self, exchange: Exchange, number: int) -> None:
        """Find the ranks.

        Called by: every rank of ``exchange``.

        Args:
            exchange: of the ranks that hold replicas.
            number: of the model, the same on all of these ranks.
        """
        session = current()
        self._rank = session.world.rank
        self._ranks = list(range(session.world.world_size))
        if exchange.world_size < len(self._ranks):
            own = torch.tensor([self._rank])
            self._ranks = exchange.all_gather(own, what="ranks with a copy").flatten().tolist()
        prefix = f"rankwise/reports/{number}-{self._ranks[0]}"
        self._store: Store | None = None if session.store is None else session.store.prefixed(prefix)

    @property
    def can_post(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    def post(self, key: str, report: object) -> dict[int, Any] | None:
        """Post a report in JSON-able form; return the reports of all ranks, by rank, on the last rank to post."""
        if self._store is None:
            return None
        part = self._store.prefixed(key)
        part.set(str(self._rank), json.dumps(report))
        if part.add("count", 1) < len(self._ranks):
            return None
        found = {rank: json.loads(part.get(str(rank), ANSWER_SECONDS)) for rank in self._ranks}
        for name in (*map(str, self._ranks), "count"):
            part.delete(name)
        return found
