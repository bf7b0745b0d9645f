# SPDX-License-Identifier: Apache-2.0
"""The job's store as carrier: ranks post what they hold, and no rank waits for another one to come.

The last rank to post compares. Where all are known to come, they may also wait for one another's reports.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from rankwise.tensors.checksum import are_equal, short

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session
    from rankwise.store.client import Store

ANSWER_SECONDS = 10.0
"""How long the store may take to return a key that is set."""
_ONE_RANK = 2**40
"""A sum of short checksums has, above its bits, the number of ranks that have added theirs: in one message."""


class Posted:
    """What some ranks post under keys, which are the same on all of them. Each key is used once."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]) -> None:
        self.store = store
        self._rank = rank
        self._ranks = list(ranks)
        self._num_gathered = 0

    @classmethod
    def of(cls, session: Session, prefix: str, ranks: Sequence[int] = ()) -> Posted | None:
        """Return what ``ranks``, or all, post under ``prefix``; ``None`` if there is no store."""
        world, store = session.world, session.store
        return None if store is None else cls(store.prefixed(prefix), world.rank, ranks or range(world.world_size))

    @classmethod
    def of_exchange(cls, exchange: Exchange, session: Session, prefix: str) -> Posted | None:
        """Return what the ranks of ``exchange`` post under ``prefix``; ``None`` if there is no store.

        Called by: every rank of ``exchange``.
        """
        ranks = list(range(session.world.world_size))
        if exchange.world_size < len(ranks):
            own = torch.tensor([session.world.rank])
            ranks = exchange.all_gather(own, what="ranks with a copy").flatten().tolist()
        return cls.of(session, f"{prefix}-{ranks[0]}", ranks)

    def reports(self, key: str, own: object) -> dict[int, Any] | None:
        """Post a report in JSON-able form; return the reports of all ranks, by rank, on the last rank to post."""
        part = self.store.prefixed(key)
        part.set(str(self._rank), json.dumps(own))
        if part.add("count", 1) < len(self._ranks):
            return None
        found = self._read(part)
        for name in (*map(str, self._ranks), "count"):
            part.delete(name)
        return found

    def gather(self, own: object, meet: Callable[[], object]) -> dict[int, Any]:
        """Post a report in JSON-able form; return the reports of all ranks, by rank, once ``meet`` has met them.

        Called by: every rank, in the same order.
        """
        self._num_gathered += 1
        part = self.store.prefixed(f"gathered/{self._num_gathered}")
        part.set(str(self._rank), json.dumps(own))
        meet()
        return self._read(part)

    def _read(self, part: Store) -> dict[int, Any]:
        return {rank: json.loads(part.get(str(rank), ANSWER_SECONDS)) for rank in self._ranks}

    def are_alike(self, key: str, checksum: int) -> bool | None:
        """Post a checksum; return whether those of all ranks are the same, on the last rank to post."""
        part = self.store.prefixed(key)
        code = short(checksum)
        part.add("squares", code * code)
        count, total = divmod(part.add("sum", _ONE_RANK + code), _ONE_RANK)
        if count < len(self._ranks):
            return None
        squares = part.add("squares", 0)
        part.delete("squares")
        part.delete("sum")
        return are_equal(len(self._ranks), total, squares)

    def earlier(self, key: str, own: object) -> tuple[int, Any] | None:
        """Post a report unless another rank has; return that rank and its report, or ``None`` if none has."""
        posted = json.dumps([self._rank, own])
        held = self.store.held_or_set(key, posted)
        return None if held == posted.encode() else tuple(json.loads(held))

    def is_first(self, key: str) -> bool:
        """Return whether this is the first call for ``key`` on any rank: to report a difference once per job."""
        return self.store.add(key, 1) == 1
