# SPDX-License-Identifier: Apache-2.0
"""The one open session of this process: its world, its store, its exchange.

A value, set by ``process_group`` only and read by everyone above. Opens and closes nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankwise.errors import NotJoined
from rankwise.stopping import Stopping

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.exchange.protocol import Exchange
    from rankwise.store import Store
    from rankwise.watch import Watch
    from rankwise.world import World


@dataclass(kw_only=True)
class Session:
    """What ``join`` opened. In a world of one there is no store, no exchange and no watch."""

    world: World
    store: Store | None = None
    exchange: Exchange | None = None
    watch: Watch | None = None
    serves_store: bool = False
    stopping: Stopping = field(default_factory=Stopping)
    leaving: list[Callable[[], None]] = field(default_factory=list)
    on_close: Callable[[], None] = lambda: None
    """Called last, however the process leaves the world."""

    def on_leave(self, action: Callable[[], None]) -> None:
        """Have ``action`` called, last one first, when the process leaves the world without an error."""
        self.leaving.append(action)


_open: list[Session] = []


def current() -> Session:
    """Return the open session.

    Raises:
        NotJoined: ``rankwise.join()`` has not been called, or the world has been left.
    """
    if not _open:
        raise NotJoined(
            "This needs a world, and none has been joined.",
            do="call rankwise.join() first, or put the code into `with rankwise.join() as world:`",
        )
    return _open[0]


def current_or_none() -> Session | None:
    """Return the open session, or ``None``."""
    return _open[0] if _open else None


def set_current(session: Session | None) -> None:
    """Replace the open session. Called by ``process_group`` only."""
    _open[:] = [session] if session is not None else []
