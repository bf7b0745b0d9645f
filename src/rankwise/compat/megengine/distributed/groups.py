# SPDX-License-Identifier: Apache-2.0
"""MegEngine's groups of ranks, backends, and the facts about this process in the world."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from rankwise.comm import collectives
from rankwise.comm.session import current, current_or_none
from rankwise.errors import CollectiveMismatch, ConfigurationError, PeerMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

P = ParamSpec("P")
T = TypeVar("T")

_BACKENDS: dict[str, dict[str, Any]] = {
    "auto": {},
    "gloo": {"backend": "gloo"},
    "nccl": {"backend": "nccl"},
    "rccl": {"backend": "nccl"},
    "shm": {"exchange": "shared_memory"},
}
"""The arguments of :func:`rankwise.join` for each of MegEngine's backends."""


class Group:
    """Some ranks, of which the first one is the root.

    Called by: every rank of the world, with the same ranks, including ranks outside the group. In MegEngine only the
    members called it; here the others take part in opening the group, but must not use it.

    Args:
        proc_ranks: of the world, each once, in any order; the first one is the root.

    Raises:
        ConfigurationError: no ranks, an unknown one or one twice; or ranks passed different ones.
        CollectiveMismatch, PeerMissing: some ranks called something else, or nothing.

    Source: rankwise.new_group.
    """

    def __init__(self, proc_ranks: Sequence[int]) -> None:
        self._proc_ranks = tuple(int(rank) for rank in proc_ranks)
        try:
            self._group: collectives.Group | None = collectives.new_group(self._proc_ranks)
        except (CollectiveMismatch, PeerMissing) as error:
            error.supplement(
                do=f"call dist.new_group({list(self._proc_ranks)}) on every rank of the world, including ranks outside "
                "the group (MegEngine: only its members)"
            )
            raise

    @property
    def proc_ranks(self) -> list[int]:
        """The ranks, in the order given."""
        return list(self._proc_ranks)

    @property
    def size(self) -> int:
        """The number of its ranks."""
        return len(self.proc_ranks)

    @property
    def key(self) -> str:
        """The ranks as a string, ``"0,2"``."""
        return ",".join(map(str, self.proc_ranks))

    @property
    def rank(self) -> int:
        """This rank's place in the order given.

        Raises:
            ConfigurationError: it is not in the group.
        """
        own = current().world.rank
        if own not in self.proc_ranks:
            raise ConfigurationError(
                f"Rank {own} is not in the group {self.proc_ranks}.",
                do="use a group only on its own ranks: `if dist.get_rank() in group.proc_ranks:`",
            )
        return self.proc_ranks.index(own)

    @property
    def root(self) -> int:
        """The first rank, by its number in the world."""
        return self.proc_ranks[0]

    @property
    def comp_node(self) -> str:
        """The device that this rank computes on."""
        return current().world.device

    @property
    def is_single_machine(self) -> bool:
        """Whether all its ranks are on this rank's machine."""
        world = current().world
        first = world.rank - world.local_rank
        return all(first <= rank < first + world.local_world_size for rank in self.proc_ranks)

    @property
    def group(self) -> collectives.Group | None:
        """The group for ``group=`` of rankwise's collectives."""
        return self._group

    @property
    def places(self) -> list[int]:
        """For each of its ranks, in the order given, the place in rankwise's order, which ascends."""
        ascending = sorted(self.proc_ranks)
        return [ascending.index(rank) for rank in self.proc_ranks]

    def __repr__(self) -> str:
        return f"Group({self.proc_ranks})"


class _WorldGroup(Group):
    def __init__(self) -> None:
        self._proc_ranks = ()
        self._group = None

    @property
    def proc_ranks(self) -> list[int]:
        return list(range(current().world.world_size))

    def __repr__(self) -> str:
        return "WORLD"


WORLD: Group = _WorldGroup()
"""All ranks: the default of every ``group``."""


def checked(group: object) -> Group:
    """Return ``group``; raise if it is not a group."""
    if not isinstance(group, Group):
        raise ConfigurationError(
            f"group must be a Group, got {group!r}.",
            do="create one with dist.new_group([...]), or omit group for WORLD",
        )
    return group


def new_group(proc_ranks: Sequence[int]) -> Group:
    """Return a group of some ranks. See :class:`Group`.

    Called by: every rank of the world, with the same ranks.
    """
    return Group(proc_ranks)


def is_distributed() -> bool:
    """Return whether a world has been joined, including one of a single rank."""
    return current_or_none() is not None


def get_rank() -> int:
    """Return this process's rank; 0 if no world has been joined."""
    session = current_or_none()
    return 0 if session is None else session.world.rank


def get_world_size() -> int:
    """Return the number of ranks; 1 if no world has been joined."""
    session = current_or_none()
    return 1 if session is None else session.world.world_size


def get_backend() -> str:
    """Return the backend: ``"nccl"`` or ``"gloo"``; ``"none"`` in a world of one.

    Raises:
        NotJoined: no world has been joined.
    """
    return current().world.backend


def arguments_of(backend: str) -> dict[str, Any]:
    """Return the arguments of :func:`rankwise.join` for one of MegEngine's backends; raise if it is unknown."""
    if backend not in _BACKENDS:
        raise ConfigurationError(
            f"Unknown backend {backend!r}.",
            do="use one of " + ", ".join(_BACKENDS) + "; auto selects NCCL on GPUs, shared memory or Gloo elsewhere",
        )
    return _BACKENDS[backend]


@contextmanager
def override_backend(new_backend: str) -> Generator[None]:
    """Check the name of a backend, and change nothing.

    The backend of a tensor is chosen when the world is joined, by the tensor's device and the location of the ranks;
    there is no other one to change to.

    Raises:
        ConfigurationError: the backend is unknown.
        NotJoined: no world has been joined.
    """
    current()
    arguments_of(new_backend)
    yield


def group_barrier(group: Group = WORLD) -> None:
    """Return when every rank of ``group`` has called it; at once if no world has been joined.

    Called by: every rank of ``group``, in the same order.

    Raises:
        PeerFailed, PeerMissing: a rank failed, left, or did not call it in time.
    """
    group = checked(group)
    if is_distributed():
        collectives.barrier(group=group.group)


def synchronized(func: Callable[P, T]) -> Callable[P, T]:
    """Make every call of ``func`` return only when it has ended on every rank; a decorator.

    Called by: every rank calls the decorated function, in the same order. To let one rank run first, for example a
    download, use :func:`rankwise.local_rank_zero_first`.
    """

    @wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        result = func(*args, **kwargs)
        group_barrier()
        return result

    return wrapper
