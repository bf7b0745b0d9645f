# SPDX-License-Identifier: Apache-2.0
"""The one open session of this process: its world, its store, its exchange, its batches, and groups of its ranks.

A value, set by ``join`` only and read by everyone above. Opens and closes nothing itself.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rankwise.comm.current_batch import BatchesInUse
from rankwise.errors import ConfigurationError, NotJoined, PeerFailed, PeerMissing, fold_ranks
from rankwise.health.preemption import Preemption
from rankwise.health.wrong_calls import fix_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.store.client import Store
    from rankwise.world.facts import World
    from rankwise.world.mesh import Axes


T = TypeVar("T")


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
    laid_out_by: str = ""
    """The call that arranged them, and its line."""
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

    def lay_out(self, axes: Axes, device_mesh: object, *, by: str) -> None:
        """Note how the ranks are arranged, and ``by`` which call of the script. Called by: every rank, once."""
        self.axes = axes
        self.device_mesh = device_mesh
        self.laid_out_by = by

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


def annotate(error: BaseException) -> None:
    """Add what explains ``error`` to it, once: the open session's note on the failed step, or a fix.

    Called by: code that reports this rank's failure, before it reads the error's text.
    """
    if not isinstance(error, Exception) or isinstance(error, PeerFailed | PeerMissing):
        return
    note = _note_for(error)
    if note is None and (fix := fix_of(error)) is not None:
        note = f"  do        {fix}"
    if note is not None and note not in getattr(error, "__notes__", ()):
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


# -- groups of its ranks -------------------------------------------------------------------------------


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
