# SPDX-License-Identifier: Apache-2.0
"""The one open session of this process: its world, its store, its exchange, its batch.

A value, set by ``join`` only and read by everyone above. Opens and closes nothing itself.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rankwise.errors import NotJoined, PeerFailed, PeerMissing
from rankwise.health.preemption import Preemption

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.store.values import Store
    from rankwise.world.facts import World
    from rankwise.world.mesh import Axes


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CurrentBatch:
    """The batch that a training loop has in hand: a rank's part of one global batch.

    A loader notes it; random numbers are drawn by it, and ranks compare it when they run backward.
    """

    loader: int
    """Number of the loader that gave it, the same on every rank; 0 where none did."""
    epoch: int
    number: int
    """Of the global batch, within the epoch."""
    num: int
    """Samples of this rank; 0 where nothing of a short batch was left for it."""
    num_global: int
    """Samples of all ranks together."""
    start: int
    """Which of them is this rank's first."""
    values: object = None
    """What the loader gave, so that tensors made of it are known."""
    thread: int = 0
    """Which took it."""


class Loop(Protocol):
    """What this rank does around a loop over a loader."""

    is_server: bool
    """Whether it takes no samples, and serves those who do."""

    @property
    def num_steps(self) -> int:
        """Steps that this rank has taken."""
        ...

    def serve_loop(self, loader: int) -> None:
        """Return when all ranks that take samples have come to the end of one more loop over a loader.

        Args:
            loader: its number.
        """
        ...

    def finish_loop(self, loader: int, *, has_stepped: bool) -> None:
        """Note that this rank has come to the end of a loop over a loader.

        Args:
            loader: its number.
            has_stepped: whether it took steps in it.
        """
        ...

    def break_loop(self, loader: int, *, has_stepped: bool) -> None:
        """The same of a loop that was broken off: raises nothing, which nobody would hear."""
        ...


@dataclass(kw_only=True)
class Session:
    """What ``join`` opened. In a world of one there is no store, no exchange and no failure detector."""

    world: World
    process: int = field(default_factory=os.getpid)
    """The process that has joined: those that are forked from it are no ranks."""
    store: Store | None = None
    exchange: Exchange | None = None
    detector: FailureDetector | None = None
    serves_store: bool = False
    preemption: Preemption = field(default_factory=Preemption)
    axes: Axes | None = None
    """How the ranks are laid out, once that has been said; else each is for itself."""
    device_mesh: object = None
    """torch's mesh of the same axes."""
    parts: dict[tuple[str, ...], Exchange] = field(default_factory=dict)
    """The exchanges of some of the ranks: along some of the axes, or of a group."""
    data_parts: str | None = None
    """What has divided samples among the ranks already, while these were not laid out along axes."""
    data_ranks: Sequence[int] | None = None
    """The ranks that take samples, where not all do."""
    loop: Loop | None = None
    """What is done around a loop over a loader, where that is not the same on all ranks."""
    num_loaders: int = 0
    """How many loaders there have been: each has a number, the same on every rank."""
    batches: dict[int, CurrentBatch] = field(default_factory=dict)
    """What each loader has given last, by its number, until its loop ends; the latest one last."""
    failure_note: str | None = None
    """What an error that this rank raises now should say besides: of the batch it has in hand."""
    share_note: tuple[int, str] | None = None
    """What an error should say besides if it speaks of the samples of a global batch, and how many these are."""
    batch: CurrentBatch | None = None
    """What this rank trains on, where a loader gave it whose loop is under way."""
    open_group: Callable[[], None] = lambda: None
    """Open torch's group where there is none yet: a world of one opens it for what cannot do without."""
    leaving: list[Callable[[], None]] = field(default_factory=list)
    ending: list[Callable[[], None]] = field(default_factory=list)
    saving: list[Callable[[], None]] = field(default_factory=list)
    """Called on every rank before state is saved: what makes it one state."""
    on_close: Callable[[], None] = lambda: None
    """Called last, however the process leaves the world."""
    _made: dict[Callable[[Session], Any], Any] = field(default_factory=dict, init=False)
    """What :meth:`once` has made."""

    def once(self, make: Callable[[Session], T]) -> T:
        """Return what ``make(session)`` returned when it was first asked for; it lives as long as the session."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    def data_rank(self, divider: str) -> tuple[int, int]:
        """Return which part of each global batch this rank takes, and how many parts there are.

        Args:
            divider: who asks, in words, for the error when ranks are laid out afterwards.
        """
        if self.data_ranks is not None:
            # Those that take none have a loader of the same length, which yields nothing.
            ranks = list(self.data_ranks)
            return ranks.index(self.world.rank) if self.world.rank in ranks else 0, len(ranks)
        if self.axes is None:
            self.data_parts = divider
            return self.world.rank, self.world.world_size
        return self.axes.data_rank(self.world.rank), self.axes.data_world_size

    @property
    def latest_batch(self) -> CurrentBatch | None:
        """What a loader gave last, also where its loop was broken off."""
        return next(reversed(self.batches.values()), None)

    def new_loader(self) -> int:
        """Return the number of one more loader. Called by: every rank."""
        self.num_loaders += 1
        return self.num_loaders

    def take(
        self, batch: CurrentBatch, *, failure_note: str | None = None, share_note: tuple[int, str] | None = None
    ) -> None:
        """Note what a loader is about to give, and what errors should say besides meanwhile."""
        self.failure_note = failure_note
        self.share_note = share_note
        self.batch = batch
        self.batches.pop(batch.loader, None)
        self.batches[batch.loader] = batch

    def break_off(self, batch: CurrentBatch | None) -> None:
        """Note that the loop over a loader was left while ``batch`` was in hand: what follows does not come from it."""
        if self.batch is batch:
            self.batch = None

    def finish_loop(self, loader: int) -> None:
        """Note that the loop over a loader has come to its end."""
        self.failure_note = self.share_note = self.batch = None
        self.batches.pop(loader, None)

    def lay_out(self, axes: Axes, device_mesh: object) -> None:
        """Note how the ranks are laid out. Called by: every rank, once."""
        self.axes = axes
        self.device_mesh = device_mesh

    def split_work(self, data_ranks: Sequence[int], loop: Loop) -> None:
        """Note which ranks take samples, where not all do, and what this one does around a loop over a loader."""
        self.data_ranks = data_ranks
        self.loop = loop

    def use_exchange(self, exchange: Exchange) -> None:
        """Have tensors travel by another exchange than torch's group. Called by ``join`` only."""
        self.exchange = exchange

    def call_last(self, action: Callable[[], None]) -> None:
        """Have ``action`` called last, however the process leaves the world."""
        self.on_close = action

    def on_leave(self, action: Callable[[], None]) -> None:
        """Have ``action`` called, last one first, when the process leaves the world without an error."""
        self.leaving.append(action)

    def at_end(self, action: Callable[[], None]) -> None:
        """Have ``action`` called when the process leaves the world, with an error or without. It must not raise."""
        self.ending.append(action)

    def before_save(self, action: Callable[[], None]) -> None:
        """Have ``action`` called, on every rank, before each save: what it changes is then in it."""
        self.saving.append(action)

    def prepare_save(self) -> None:
        """Call what was to be called before a save. Called by: every rank."""
        for action in self.saving:
            action()


class _Process:
    """What this process is part of."""

    session: Session | None = None


_process = _Process()


def current() -> Session:
    """Return the open session.

    Raises:
        NotJoined: ``rankwise.join()`` has not been called, or the world has been left.
    """
    if _process.session is None:
        raise NotJoined(
            "No world has been joined.",
            do="call rankwise.join() first, or put the code inside `with rankwise.join() as world:`",
        )
    return _process.session


def current_or_none() -> Session | None:
    """Return the open session, or ``None``."""
    return _process.session


def annotate(error: BaseException) -> None:
    """Add to ``error`` what the open session knows of the step that failed, once.

    Called by: what reports the failure of this rank, before it reads the error's text.
    """
    note = _note_for(error)
    is_own = isinstance(error, Exception) and not isinstance(error, PeerFailed | PeerMissing)
    if note is not None and is_own and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def set_current(session: Session | None) -> None:
    """Replace the open session. Called by ``join`` only."""
    _process.session = session


def _note_for(error: BaseException) -> str | None:
    session = current_or_none()
    if session is None or session.failure_note is not None or session.share_note is None:
        return None if session is None else session.failure_note
    global_batch_size, words = session.share_note
    is_about_it = re.search(rf"\b{global_batch_size}\b", str(error)) is not None
    return words if is_about_it else None
