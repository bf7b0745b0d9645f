# SPDX-License-Identifier: Apache-2.0
"""Decisions from the requests of all ranks: which operations are ready or mismatch, which ranks wait for each other.

Pure functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise.compat.horovod.errors import HorovodInternalError
from rankwise.compat.horovod.negotiation.request import HAS_JOINED, Key, OperationRequest, request_from_json
from rankwise.errors import fold_ranks, fold_values

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


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
