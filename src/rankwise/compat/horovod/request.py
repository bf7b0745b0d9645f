# SPDX-License-Identifier: Apache-2.0
"""One operation: as other ranks know it, as this rank holds it, and what the requests of all ranks decide.

Requests are matched by their names: which are ready, which mismatch, which ranks wait for each other.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise.compat.horovod.exceptions import HorovodInternalError
from rankwise.errors import ConfigurationError, fold_ranks, fold_values

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    from rankwise.comm.collectives import Group


class ReduceOp(IntEnum):
    """How the values of all ranks are combined."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def chosen_op(op: int | None, average: bool | None) -> ReduceOp:  # noqa: FBT001 - Horovod's old argument
    """Return the reduction of ``op`` or of the older ``average``; the average by default."""
    if op is not None:
        if average is not None:
            raise ConfigurationError("op= and average= were both given.", do="pass op= only: hvd.Average or hvd.Sum")
        return known_op(op)
    if average is not None:
        # Begins as Horovod's, which people filter on.
        message = "Parameter `average` has been replaced with `op`. Pass op=hvd.Average or op=hvd.Sum."
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average


def known_op(op: int) -> ReduceOp:
    """Return the reduction of a number; raise if it is unknown."""
    try:
        return ReduceOp(op)
    except ValueError:
        raise ConfigurationError(
            f"Unknown reduction {op!r}.", do="use hvd.Average, Sum, Adasum, Min, Max or Product"
        ) from None


ANNOUNCED = "step"
"""The kind of a step that sends nothing itself, and runs on the ranks that announce it."""
ROWS_MAY_DIFFER = ("allgather", "alltoall")
"""The kinds whose tensors need not have the same first dimension on all ranks."""

POLLS, WAITS, LEAVES, HAS_JOINED = range(4)
"""Why a rank waits: only ``POLLS`` ends when nothing has happened."""

Key = tuple[int, str]


class OperationRequest(NamedTuple):
    """One operation, as it is sent to the other ranks."""

    kind: str
    name: str
    set_id: int = 0
    op: int = int(ReduceOp.SUM)
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of each tensor; without the first dimension where that may differ between ranks."""
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    allows_joined: bool = True

    @property
    def key(self) -> Key:
        """The key by which requests of different ranks are matched."""
        return self.set_id, self.name

    def __str__(self) -> str:
        tensors = ", ".join(
            f"{dtype}[{', '.join(['rows'] * (self.kind in ROWS_MAY_DIFFER) + [str(size) for size in shape])}]"
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        )
        texts = [tensors] if tensors else []
        if self.kind == "allreduce":
            texts.append(f"op={ReduceOp(self.op).name.title()}")
        if self.kind == "broadcast":
            texts.append(f"root_rank={self.root}")
        if (self.prescale, self.postscale) != (1.0, 1.0):
            texts.append(f"prescale_factor={self.prescale}, postscale_factor={self.postscale}")
        if tensors:
            texts.append(f"on {self.device}")
        return f"{self.kind}({', '.join(texts)})"


@lru_cache(maxsize=256)
def digest_of(requests: tuple[OperationRequest, ...]) -> int:
    """Return a number of 63 bits that is equal for equal requests in equal order."""
    text = repr([tuple(request) for request in requests])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def request_from_json(value: list[Any]) -> OperationRequest:
    """Return the request that JSON turned into a list."""
    request = OperationRequest(*value)
    return request._replace(dtypes=tuple(request.dtypes), shapes=tuple(map(tuple, request.shapes)))


class SetMembers(NamedTuple):
    """The ranks of a process set."""

    ranks: tuple[int, ...]
    group: Group | None
    """``None`` for the world."""


@dataclass(kw_only=True, eq=False)
class PendingOperation:
    """One operation of this rank, from the call that starts it to the call that returns its result."""

    request: OperationRequest
    members: SetMembers
    tensors: Sequence[torch.Tensor] = ()
    """This rank's input, none with a gradient; zeros if it has joined."""
    is_in_place: bool = False
    """Whether the results are written into ``tensors``."""
    splits: Sequence[int] = ()
    """Of an alltoall, the number of rows for each member."""
    make_result: Callable[[list[torch.Tensor]], Any] = list
    """Makes the call's result from the tensors that arrived."""
    take_part: Callable[[], None] | None = None
    """Of an announced step: runs it, in place of sending tensors."""
    is_done: bool = False
    result: Any = None
    error: Exception | None = None

    def finish(self, tensors: list[torch.Tensor]) -> None:
        """Make the result from the tensors that arrived."""
        try:
            self.result = self.make_result(tensors)
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits for this request
            self.error = error
        self.end()

    def end(self, error: Exception | None = None) -> None:
        """Mark it as done, and release its tensors."""
        self.error = self.error or error
        self.tensors = ()
        self.is_done = True


def called(mode: int, waited_for: PendingOperation | None) -> str:
    """Return the call that waits, as ``hvd.allreduce 'x'``."""
    if waited_for is None or mode == POLLS:
        return {HAS_JOINED: "hvd.join()", LEAVES: "hvd.shutdown()"}.get(mode, "hvd.poll()")
    prefix, dot, name = waited_for.request.name.partition(".")
    return f"hvd.{prefix} {name!r}" if dot else f"hvd.{prefix}"


def waits_for(mode: int, waited_for: PendingOperation | None) -> str:
    """Return why a rank waits, in words, for error messages on other ranks."""
    if waited_for is not None and mode != POLLS:
        request = waited_for.request
        return f"waits for {request.name!r}" + (f", {request}" if request.dtypes else "")
    return {HAS_JOINED: "has called join()", LEAVES: "has reached the end"}.get(mode, "polls")


NEED_EVERY_RANK = ("allgather", "broadcast", "alltoall", "reducescatter")
"""Kinds that the zeros of a joined rank cannot stand in for; Horovod refuses them too."""


class RankState(NamedTuple):
    """The pending requests of one rank, and why it waits."""

    requests: tuple[OperationRequest, ...]
    mode: int
    waits: str = ""
    """What it waits for, in words."""


class Decision(NamedTuple):
    """An operation that every member has requested; it fails if there is an error."""

    request: OperationRequest
    error: HorovodInternalError | None = None


def state_from_json(value: list[Any]) -> RankState:
    """Return the state that JSON turned into a list."""
    requests, mode, waits = value
    return RankState(tuple(map(request_from_json, requests)), mode, waits)


def decide(states: Sequence[RankState], ranks_of_set: Mapping[int, Collection[int]]) -> list[Decision]:
    """Return the operations that can be carried out, in the order in which every rank does so."""
    joined = {rank for rank, state in enumerate(states) if state.mode == HAS_JOINED}
    held: dict[Key, dict[int, OperationRequest]] = {}
    for rank, state in enumerate(states):
        for request in state.requests:
            held.setdefault(request.key, {})[rank] = request
    decisions: list[Decision] = []
    for request_of_rank in held.values():
        first = next(iter(request_of_rank.values()))
        missing = set(ranks_of_set[first.set_id]) - set(request_of_rank)
        if not missing:
            decisions.append(Decision(first, mismatch(request_of_rank)))
        elif missing <= joined and first.allows_joined:
            decisions.append(Decision(first, mismatch(request_of_rank) or _refused_in_join(first, missing)))
    return decisions


def mismatch(request_of_rank: Mapping[int, OperationRequest]) -> HorovodInternalError | None:
    """Return the error of ranks that passed different arguments under one name, or ``None``."""
    requests = request_of_rank.values()
    for what, values in (
        ("numbers of tensors", {len(request.shapes) for request in requests}),
        ("data types", {request.dtypes for request in requests}),
        ("operations", {request.kind for request in requests}),
        ("shapes", {request.shapes for request in requests}),
        ("prescale or postscale factors", {(request.prescale, request.postscale) for request in requests}),
        ("reduction ops", {request.op for request in requests}),
        ("root ranks", {request.root for request in requests}),
        ("devices, CPU and GPU", {request.device for request in requests}),
    ):
        if len(values) > 1:
            return HorovodInternalError(
                f"{next(iter(requests)).name!r} was called with different {what}.",
                evidence=fold_values(request_of_rank),
                do="pass the same on every rank, or give calls that do not belong together different names",
            )
    return None


def stalled(
    states: Mapping[int, RankState],
    ranks_of_set: Mapping[int, Collection[int]],
    stuck: Collection[int],
    others: Collection[int] = (),
) -> HorovodInternalError:
    """Return the error of the ``stuck`` ranks, each of which waits for an operation that another one has not called.

    It also names the ranks of ``others``, which have reached the end of the script.
    """
    missing: list[str] = []
    seen: set[Key] = set()
    for rank in sorted(stuck):
        for request in states[rank].requests:
            if request.key not in seen:
                seen.add(request.key)
                holders = {other for other, state in states.items() if request.key in {r.key for r in state.requests}}
                absent = sorted(set(ranks_of_set[request.set_id]) - holders)
                if absent:
                    missing.append(f"{request.name!r} was not called on {fold_ranks(absent)}")
    what = (
        "Every rank waits for an operation that another rank has not called: none can continue."
        if len(stuck) == len(states)
        else f"{fold_ranks(list(stuck)).capitalize()} cannot continue: waiting for an operation that another rank "
        "has not called."
    )
    named = sorted({*stuck, *others})
    return HorovodInternalError(
        what,
        evidence="\n".join([fold_values({rank: states[rank].waits for rank in named}), *missing]),
        do="call the same names on every rank; operations without a name are matched by how many came before them",
    )


def _refused_in_join(request: OperationRequest, missing: Collection[int]) -> HorovodInternalError | None:
    if request.kind not in NEED_EVERY_RANK:
        return None
    return HorovodInternalError(
        f"{request.name!r} needs every rank, and {fold_ranks(sorted(missing))} called join().",
        evidence=f"{request}; a rank that has called join() takes part in allreduce and barrier only",
        do="call it before any rank calls hvd.join(), or use allreduce; for sparse gradients pass "
        "hvd.DistributedOptimizer(sparse_as_dense=True)",
    )
