# SPDX-License-Identifier: Apache-2.0
"""MegEngine's groups of ranks, backends, and the facts about this process in the world; and collectives of a group.

These are rankwise's, along any axis, and in the order of the group: the ranks of a rankwise group ascend; those of a
MegEngine group are in the given order.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch

from rankwise.comm import collectives
from rankwise.comm.session import current, current_or_none
from rankwise.errors import CollectiveMismatch, ConfigurationError, PeerMissing
from rankwise.replicate.bucket import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

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


def through(
    data: torch.Tensor,
    *,
    there: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return ``there(data)``; backward computes the gradient of ``data`` by ``back``."""
    return cast("torch.Tensor", _WithBackward.apply(data, there, back))


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        data: torch.Tensor,
        there: Callable[[torch.Tensor], torch.Tensor],
        back: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.back = back
        return there(data.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "Collectives do not support second derivatives: backward(create_graph=True) cannot pass through them.",
                do="omit create_graph=True, or compute the second derivative on one rank",
            )
        return ctx.back(gradients[0]), None, None


def checked_axis(name: str, inp: torch.Tensor, axis: int, *, parts: int = 1) -> int:
    """Return ``axis`` counted from the front; raise if it is not a dimension, or cannot be divided into ``parts``."""
    if isinstance(axis, bool) or not isinstance(axis, int) or not -inp.ndim <= axis < inp.ndim:
        raise ConfigurationError(
            f"{name} got axis={axis!r} for a tensor of {inp.ndim} dimensions.",
            evidence=f"the shape is {list(inp.shape)}",
            do="pass one of its dimensions; reshape a scalar first: x.reshape(1)",
        )
    if inp.shape[axis] % parts:
        raise ConfigurationError(
            f"{name} cannot divide axis {axis} of {list(inp.shape)} into {parts} equal parts.",
            do="pad it, or use rankwise.reduce_scatter() or all_to_all(), which accept unequal parts",
        )
    return axis % inp.ndim


def refuse_device(name: str, device: str | None) -> None:
    """Raise if a device was passed: MegEngine's devices were streams."""
    if device:
        raise ConfigurationError(
            f"{name} was given device={device!r}, but results stay on the device of the input.",
            do="omit device, and move the result with .to(device)",
        )


def gathered(data: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in the group's order."""
    parts = collectives.all_gather(data, group=group.group)
    return [parts[place] for place in group.places]


def scattered_sum(data: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """Return this rank's part of the sum over ranks, divided along ``axis``."""
    parts = _upwards(data.tensor_split(group.size, axis), group)
    rows = torch.cat([part.movedim(axis, 0) for part in parts])
    return collectives.reduce_scatter(rows, group=group.group).movedim(0, axis)


def exchanged(data: torch.Tensor, group: Group, split_axis: int, concat_axis: int) -> torch.Tensor:
    """Return the parts of all ranks for this one, concatenated along ``concat_axis``."""
    return torch.cat(_to_each(data.tensor_split(group.size, split_axis), group), concat_axis)


def gathered_at_root(data: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """Return the concatenated tensors of all ranks on the root; elsewhere zeros of that shape."""
    nothing = data.new_empty(0)
    received = _to_each([data, *[nothing] * (group.size - 1)], group)
    if group.rank == 0:
        return torch.cat(received, axis)
    shape = list(data.shape)
    shape[axis] *= group.size
    return data.new_zeros(()).expand(shape)


def scattered_from_root(data: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """Return this rank's part of the root's tensor."""
    nothing = data.new_empty(0)
    parts = data.tensor_split(group.size, axis) if group.rank == 0 else [nothing] * group.size
    return _to_each(parts, group)[0]


def _to_each(parts: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Send a part to each rank, and return the parts from each, both in the group's order."""
    received = collectives.all_to_all(_upwards(parts, group), group=group.group)
    return [received[place] for place in group.places]


def _upwards(parts: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Return parts that are in the group's order, in ascending order of ranks."""
    return [part for _, part in sorted(zip(group.proc_ranks, parts, strict=True), key=lambda pair: pair[0])]


REDUCE_METHODS = ("sum", "mean")


def bcast_list_(inps: Iterable[torch.Tensor], group: Group = WORLD) -> None:
    """Overwrite tensors, in place, with those of the root, for example parameters before a training.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.

    Args:
        inps: tensors, as ``model.parameters()`` gives them.
        group: whose first rank is the root.

    Raises:
        ConfigurationError: something in ``inps`` is not a tensor.
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`rankwise.broadcast`.
    """
    group = checked(group)
    tensors = list(inps)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(
                f"bcast_list_ takes tensors, not {type(tensor).__name__}.",
                do="pass model.parameters() or model.buffers()",
            )
    received = collectives.broadcast([tensor.detach() for tensor in tensors], group.root, group=group.group)
    with torch.no_grad():
        for tensor, value in zip(tensors, received, strict=True):
            tensor.copy_(value)


class AllreduceCallback:
    """Makes a GradManager add up, or average, gradients over ranks. It only holds the options of that.

    Every rank has the same weight, whatever its number of samples. A parameter that a rank did not use counts as zero
    there; one that no rank used keeps ``grad=None``. Gradients are sent in buckets, while backward runs.

    Args:
        reduce_method: ``"sum"`` or ``"mean"``.
        group: the ranks.
        backend: one of MegEngine's names; it has no effect, see ``override_backend``.

    Raises:
        ConfigurationError: ``reduce_method`` or ``backend`` is unknown.
    """

    def __init__(self, reduce_method: str, group: Group = WORLD, backend: str | None = None) -> None:
        if reduce_method.lower() not in REDUCE_METHODS:
            raise ConfigurationError(
                f"Unknown reduce_method {reduce_method!r}.", do="use one of " + ", ".join(REDUCE_METHODS)
            )
        if backend is not None:
            arguments_of(backend)
        self.reduce_method = reduce_method.lower()
        self.group = checked(group)

    def weights(self, num_ranks: int) -> Weights:
        """Return the weight of every rank's gradients, which does not depend on its number of samples."""
        # For a sum, the factor cancels the division by the number of ranks: the bits are those of a plain sum.
        return Weights(float(num_ranks) if self.reduce_method == "sum" else 1.0, 1.0)

    def __call__(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - as callbacks are called
        """Raise: gradients are not reduced one by one.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "The callback of make_allreduce_cb() works only with a GradManager, which reduces many gradients together.",
            do="pass it to gm.attach(model.parameters(), callbacks=[...]); use all_reduce_sum() for one tensor",
        )


make_allreduce_cb = AllreduceCallback
