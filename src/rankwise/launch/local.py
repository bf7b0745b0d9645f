# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of one machine: a store of its own for every attempt, on a port the system chose.

No fixed port, nothing shared between an attempt and the next. Handed to the agent as a value:
several machines will have another value of the same type. Imported by the launcher's start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from rankwise.store import serve

if TYPE_CHECKING:
    from rankwise.store import Store

LOOPBACK = "127.0.0.1"


class LocalRendezvous(RendezvousHandler):
    """One agent, alone: every rendezvous succeeds at once with a new store."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._is_closed = False
        self.attempt = -1
        self.store: Store | None = None

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "rankwise-local"

    @property
    def use_agent_store(self) -> bool:
        """Return that workers use the store served here."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Serve the store of the next attempt."""
        self.attempt += 1
        self.store, port = serve(LOOPBACK, 0)
        address = RendezvousStoreInfo(LOOPBACK, port)
        return RendezvousInfo(self.store.torch_store, 0, 1, bootstrap_store_info=address)

    def is_closed(self) -> bool:
        """Return whether no further attempt can start."""
        return self._is_closed

    def set_closed(self) -> None:
        """Let no further attempt start."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Return how many machines wait to come in: none."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of this run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Stop serving."""
        self.store = None
        return True
