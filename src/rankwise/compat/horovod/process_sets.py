# SPDX-License-Identifier: Apache-2.0
"""Process sets: some of the ranks, for the ``process_set=`` of operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.compat.horovod.exceptions import Refused, not_initialized
from rankwise.compat.horovod.queue import announce, current_queue, current_queue_or_none
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankwise.comm.collectives import Group
    from rankwise.compat.horovod.request import SetMembers


class ProcessSet:
    """Some of the ranks. Pass it to ``hvd.init()`` or :func:`add_process_set`, the same on every rank.

    Args:
        ranks_or_comm: the ranks, in any order.

    Raises:
        ConfigurationError: ``ranks_or_comm`` is something else, such as an MPI communicator.
    """

    process_set_id: int | None = None
    """Its number, the same on all ranks; ``None`` if it is not in use."""
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        ranks = list(ranks_or_comm) if hasattr(ranks_or_comm, "__iter__") else [None]
        if not all(isinstance(rank, int) for rank in ranks):
            raise ConfigurationError(
                f"ProcessSet cannot be created from {ranks_or_comm!r}.",
                do="pass a list of ranks: hvd.ProcessSet([0, 2])",
            )
        self.ranks = sorted(int(rank) for rank in ranks if rank is not None)
        self._queue: object = None

    @property
    def group(self) -> Group | None:
        """Its group, for ``group=`` of rankwise's own calls; ``None`` for the world."""
        return self._members.group

    @property
    def _members(self) -> SetMembers:
        return current_queue().members[members_of(self)]

    def size(self) -> int | None:
        """Return the number of its ranks, or ``None`` if it is not in use."""
        return None if self.process_set_id is None else len(self._members.ranks)

    def rank(self) -> int | None:
        """Return this rank's place in it, or ``None`` if it is not in use.

        Raises:
            ConfigurationError: this rank is not in it.
        """
        if self.process_set_id is None:
            return None
        ranks, own = self._members.ranks, current_queue().session.world.rank
        if own not in ranks:
            raise ConfigurationError(
                f"Rank {own} is not in {self}.", do="check process_set.included() before process_set.rank()"
            )
        return ranks.index(own)

    def included(self) -> bool | None:
        """Return whether this rank is in it."""
        return None if self.ranks is None else current_queue().session.world.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set after ``hvd.init()``; no variable needs to be set for it.

    Called by: every rank, with the same ranks, including ranks outside the set.

    Args:
        process_set: a process set, or a list of ranks.

    Returns:
        The process set, ready for use.

    Raises:
        ConfigurationError: a set of these ranks exists, or a rank is unknown.

    Source: rankwise.new_group.
    """
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    queue = current_queue()
    ranks = tuple(chosen.ranks or ())
    for number, members in queue.members.items():
        if members.ranks == ranks:
            raise ConfigurationError(
                f"A process set of ranks {list(ranks)} already exists.",
                evidence="it is hvd.global_process_set" if number == 0 else f"its number is {number}",
                do="use that one, or remove it first",
            )
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(queue.members[0].ranks):
        raise ConfigurationError(
            f"Ranks {list(ranks)} cannot form a process set.",
            evidence=f"the ranks are 0 to {len(queue.members[0].ranks) - 1}",
            do="pass at least one rank, each once",
        )

    def open_group() -> None:
        _bind(chosen, queue.add_members(ranks))
        queue.follow_sets()

    announce(f"add_process_set({list(ranks)})", open_group)
    return chosen


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set.

    Called by: every rank, with the same process set.

    Returns:
        Whether it was removed: the global one, and one that is not in use, are not.

    Raises:
        ConfigurationError: operations of it are pending on this rank.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    queue = current_queue()
    members_of(process_set)
    pending = [name for set_id, name in queue.pending if set_id == number]
    if pending:
        raise ConfigurationError(
            f"{process_set} has pending operations.", evidence=", ".join(pending), do="synchronize them first"
        )

    def close() -> None:
        del queue.members[number]
        queue.follow_sets()

    announce(f"remove_process_set({process_set.ranks})", close)
    process_set.process_set_id = None
    return True


def members_of(process_set: ProcessSet) -> int:
    """Return the number of a process set; raise if it is not in use."""
    queue = current_queue_or_none()
    if queue is None:
        raise not_initialized()
    if not isinstance(process_set, ProcessSet):
        raise ConfigurationError(
            f"process_set= takes a ProcessSet, not {process_set!r}.",
            do="omit it for all ranks, or pass what hvd.add_process_set([...]) returns",
        )
    number = process_set.process_set_id
    if number is None or number not in queue.members or (number != 0 and process_set._queue is not queue):  # noqa: SLF001 - its own module
        raise Refused(
            f"{process_set} is not in use.", do="give it to hvd.init(process_sets=[...]) or hvd.add_process_set()"
        )
    return number


def bind_known(process_set: ProcessSet) -> bool:
    """Give a process set the number of the set in use that has its ranks; return whether there is one."""
    for number, members in current_queue().members.items():
        if number != 0 and list(members.ranks) == process_set.ranks:
            _bind(process_set, number)
            return True
    return False


def bind_global(ranks: Sequence[int]) -> None:
    """Set the ranks of ``global_process_set``. Called by ``hvd.init()`` only."""
    global_process_set.ranks = list(ranks)


def _bind(process_set: ProcessSet, number: int) -> None:
    process_set.process_set_id = number
    process_set._queue = current_queue()  # noqa: SLF001 - its own module
