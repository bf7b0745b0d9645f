# SPDX-License-Identifier: Apache-2.0
"""The one open session of this process: its world, its store, its exchange, its batches.

A value, set by ``join`` only and read by everyone above. Opens and closes nothing itself. Loaders note the batches that
their loops are using; random numbers, losses and errors read them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from rankwise.errors import NotJoined, PeerFailed, PeerMissing
from rankwise.health.preemption import Preemption

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.store.values import Store
    from rankwise.world.facts import World
    from rankwise.world.mesh import Axes


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CurrentBatch:
    """The batch that a training loop is using: a rank's part of one global batch.

    A loader records it; random numbers depend on it, and ranks compare it when they run backward.
    """

    loader: int
    """Number of the loader that yielded it, the same on every rank; 0 without a loader."""
    epoch: int
    number: int
    """Of the global batch, within the epoch."""
    num: int
    """Samples of this rank; 0 if a short batch has none left for it."""
    num_global: int
    """Samples of all ranks together."""
    start: int
    """The index of this rank's first sample among them."""
    values: object = None
    """The batch that the loader yielded, to recognize tensors derived from it."""
    thread: int = 0
    """The thread that took it."""
    dims: Callable[[], Mapping[str, int]] | None = None
    """Returns which dim of each tensor in a batch holds the samples, if a function of the user's made the batch."""

    indices: Callable[[], Sequence[int]] | None = None
    """Returns the places of this rank's samples in the dataset, where they have any."""

    def dim_of_samples(self, path: str, tensor: torch.Tensor) -> int | None:
        """Return which dim of the tensor at ``path`` in the batch holds the samples; ``None`` if none does."""
        dims = [dim for dim, size in enumerate(tensor.shape) if size == self.num]
        if self.dims is None:
            return 0 if dims[:1] == [0] else None
        if len(dims) > 1:
            found = self.dims().get(path)
            return found if found in dims else None
        return dims[0] if dims else None


@dataclass
class BatchesInUse:
    """The batches of one session's loaders."""

    current: CurrentBatch | None = None
    """The batch this rank trains on, if it is from a loader whose loop is running."""
    in_use: dict[int, CurrentBatch] = field(default_factory=dict)
    """The last batch of each loader, by its number, until its loop ends; the latest one last."""
    reads: Literal["", "samples", "batches"] = ""
    """What a loader reads now, if it does: random numbers are seeded by sample where it reads one sample at a time."""
    failure_note: str | None = None
    """A note on the current batch, to be added to an error that this rank raises now."""
    share_note: tuple[int, str] | None = None
    """The samples of a global batch, and the note to add to an error that mentions that number."""
    _taking: list[Callable[[CurrentBatch], None]] = field(default_factory=list, init=False)
    _looping: list[Callable[[], None]] = field(default_factory=list, init=False)
    _outer: dict[int, CurrentBatch | None] = field(default_factory=dict, init=False)
    """The batch in hand when the loop over a loader began, by the loader's number."""

    @property
    def latest(self) -> CurrentBatch | None:
        """The last batch of a loader, even if its loop was left early."""
        return next(reversed(self.in_use.values()), None)

    def begin_batch(
        self, batch: CurrentBatch, failure_note: str | None = None, share_note: tuple[int, str] | None = None
    ) -> None:
        """Note the batch that a loader is about to yield, and the note for errors raised meanwhile."""
        self.failure_note = failure_note
        self.share_note = share_note
        if batch.loader not in self._outer:
            self._outer[batch.loader] = self.current
        self.current = batch
        self.in_use.pop(batch.loader, None)
        self.in_use[batch.loader] = batch
        for action in self._taking:
            action(batch)

    def break_off(self, batch: CurrentBatch | None) -> None:
        """Note that a loop was left during ``batch``: later work does not belong to it."""
        if batch is not None and self.current is batch:
            self.current = self._outer_of(batch.loader)

    def finish_loop(self, loader: int) -> None:
        """Note that the loop over a loader has ended."""
        self.failure_note = self.share_note = None
        self.in_use.pop(loader, None)
        self.current = self._outer_of(loader)
        for action in self._looping:
            action()

    def _outer_of(self, loader: int) -> CurrentBatch | None:
        """Return the batch of the loop that a loop has run in, as validation does, if that one is not over."""
        outer = self._outer.pop(loader, None)
        return outer if outer is not None and self.in_use.get(outer.loader) is outer else None

    def set_reading(self, what: Literal["", "samples", "batches"]) -> Literal["", "samples", "batches"]:
        """Set what a loader reads from now on; return what it read before."""
        before, self.reads = self.reads, what
        return before

    def on_take(self, action: Callable[[CurrentBatch], None]) -> None:
        """Call ``action`` for each batch that a loader is about to yield."""
        self._taking.append(action)

    def forget_on_take(self, action: Callable[[CurrentBatch], None]) -> None:
        """Call an action of :meth:`on_take` no more."""
        self._taking.remove(action)

    def after_loop(self, action: Callable[[], None]) -> None:
        """Call ``action`` at the end of every loop over a loader that was not left early."""
        self._looping.append(action)


class Loop(Protocol):
    """What this rank does around a loop over a loader."""

    is_server: bool
    """Whether it takes no samples, and serves the ranks that do."""

    @property
    def num_steps(self) -> int:
        """Steps that this rank has taken."""
        ...

    def serve_loop(self, loader: int) -> None:
        """Return when all ranks that take samples have ended another loop over the loader of this number."""
        ...

    def finish_loop(self, loader: int, *, has_stepped: bool) -> None:
        """Note that this rank has reached the end of a loop over a loader, and whether it took steps in it."""
        ...

    def break_loop(self, loader: int, *, has_stepped: bool) -> None:
        """The same for a loop left early: raises nothing, since the error would be lost."""
        ...


@dataclass(kw_only=True)
class Session:
    """What ``join`` opened. In a world of one there is no store, no exchange and no failure detector.

    It has more fields than other classes, as the one place that says which of these are open: all have its lifetime.
    """

    world: World
    process: int = field(default_factory=os.getpid)
    """The process that has joined: those forked from it are not ranks."""
    store: Store | None = None
    exchange: Exchange | None = None
    detector: FailureDetector | None = None
    object_key: bytes = field(default=b"", repr=False)
    """Signs the objects that ranks send each other."""
    num_groups: int = 0
    """How many groups were created: each has a number, the same on every rank."""
    serves_store: bool = False
    preemption: Preemption = field(default_factory=Preemption)
    axes: Axes | None = None
    """How the ranks are arranged, once ``mesh`` was called."""
    device_mesh: object = None
    """torch's mesh of the same axes."""
    parts: dict[tuple[str, ...], Exchange] = field(default_factory=dict)
    """The exchanges of subsets of the ranks: along some of the axes, or of a group."""
    data_parts: str | None = None
    """What has already divided samples among the ranks, before they were arranged along axes."""
    data_ranks: Sequence[int] | None = None
    """The ranks that take samples, if not all do."""
    loop: Loop | None = None
    """Actions around a loop over a loader, if they are not the same on all ranks."""
    num_loaders: int = 0
    """How many loaders there have been: each has a number, the same on every rank."""
    batches: BatchesInUse = field(default_factory=BatchesInUse)
    """The batches that loops over loaders are using."""
    open_group: Callable[[], None] = lambda: None
    """Open torch's group if there is none yet: a world of one opens it only for code that needs it."""
    leaving: list[Callable[[], None]] = field(default_factory=list)
    ending: list[Callable[[], None]] = field(default_factory=list)
    saving: list[Callable[[], None]] = field(default_factory=list)
    """Called on every rank before state is saved, to make it one state."""
    are_worker_groups_averaged: bool = False
    """Whether something averages what worker groups of ranks train."""
    on_close: Callable[[], None] = lambda: None
    """Called last, however the process leaves the world."""
    _made: dict[Callable[[Session], Any], Any] = field(default_factory=dict, init=False)
    """Values that :meth:`once` has created."""

    def once(self, make: Callable[[Session], T]) -> T:
        """Return the result of the first ``make(session)``; it lives as long as the session."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    def made(self, make: Callable[[Session], T]) -> T | None:
        """Return the result of :meth:`once`, if it was called."""
        return self._made.get(make)

    def data_rank(self, divider: str) -> tuple[int, int]:
        """Return which part of each global batch this rank takes, and how many parts there are.

        ``divider`` describes the caller, for the error when ranks are arranged along axes afterwards.
        """
        if self.data_ranks is not None:
            # Ranks that take none have a loader of the same length, which yields nothing.
            ranks = list(self.data_ranks)
            return ranks.index(self.world.rank) if self.world.rank in ranks else 0, len(ranks)
        if self.axes is None:
            self.data_parts = divider
            return self.world.rank, self.world.world_size
        return self.axes.data_rank(self.world.rank), self.axes.data_world_size

    def new_loader(self) -> int:
        """Return the number of a new loader. Called by: every rank."""
        self.num_loaders += 1
        return self.num_loaders

    def number_group(self) -> int:
        """Count a group that is created now, and return its number. Called by every rank, for each group."""
        self.num_groups += 1
        return self.num_groups

    def lay_out(self, axes: Axes, device_mesh: object) -> None:
        """Note how the ranks are arranged. Called by: every rank, once."""
        self.axes = axes
        self.device_mesh = device_mesh

    def split_work(self, data_ranks: Sequence[int], loop: Loop) -> None:
        """Note which ranks take samples, if not all do, and this rank's actions around a loop over a loader."""
        self.data_ranks = data_ranks
        self.loop = loop

    def use_exchange(self, exchange: Exchange) -> None:
        """Send tensors through another exchange than torch's group. Called by ``join`` only."""
        self.exchange = exchange

    def call_last(self, action: Callable[[], None]) -> None:
        """Call ``action`` last, however the process leaves the world."""
        self.on_close = action

    def on_leave(self, action: Callable[[], None]) -> None:
        """Call ``action``, last one first, when the process leaves the world without an error."""
        self.leaving.append(action)

    def at_end(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the process leaves the world, with or without an error. It must not raise."""
        self.ending.append(action)

    def before_save(self, action: Callable[[], None]) -> None:
        """Call ``action`` on every rank before each save: the save includes its changes."""
        self.saving.append(action)

    def average_worker_groups(self) -> None:
        """Note that the caller averages what worker groups of ranks train."""
        self.are_worker_groups_averaged = True

    def prepare_save(self) -> None:
        """Call the actions registered with :meth:`before_save`. Called by: every rank."""
        for action in self.saving:
            action()


class _Joined:
    """What this process has joined."""

    session: Session | None = None
    is_known: bool = False
    """Whether there has been a session, which may have ended."""


_joined = _Joined()


def current() -> Session:
    """Return the open session.

    Raises:
        NotJoined: ``rankwise.join()`` has not been called, or the world has been left.
    """
    if _joined.session is None:
        raise NotJoined(
            "No world has been joined.",
            do="call rankwise.join() first, or put the code inside `with rankwise.join() as world:`",
        )
    return _joined.session


def current_or_none() -> Session | None:
    """Return the open session, or ``None``."""
    return _joined.session


def has_joined() -> bool:
    """Return whether this process has joined a world, which it may have left."""
    return _joined.is_known


_FIXES = {
    r"Cannot interpret 'torch\.\w+' as a data type": "NumPy does not know torch's dtypes: write tensor.dtype in place "
    "of np.dtype(tensor.dtype).name",
    r"'[\d,-]+' does not appear to be an IPv4 or IPv6 address": "If the address is a list of machines, such as "
    "host[0-1], give the first one: scontrol show hostnames | head -n 1",
}
"""Notes on errors of other libraries that scripts for clusters run into, by a pattern of their text."""


def annotate(error: BaseException) -> None:
    """Add what explains ``error`` to it, once: the open session's note on the failed step, or a fix.

    Called by: code that reports this rank's failure, before it reads the error's text.
    """
    fixes = (fix for pattern, fix in _FIXES.items() if re.search(pattern, str(error)))
    note = _note_for(error) or next(fixes, None)
    is_own = isinstance(error, Exception) and not isinstance(error, PeerFailed | PeerMissing)
    if note is not None and is_own and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def set_current(session: Session | None) -> None:
    """Replace the open session. Called by ``join`` only."""
    _joined.session = session
    _joined.is_known = _joined.is_known or session is not None


def _note_for(error: BaseException) -> str | None:
    session = current_or_none()
    if session is None or session.batches.failure_note is not None or session.batches.share_note is None:
        return None if session is None else session.batches.failure_note
    global_batch_size, words = session.batches.share_note
    is_about_it = re.search(rf"\b{global_batch_size}\b", str(error)) is not None
    return words if is_about_it else None
