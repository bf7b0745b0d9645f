# SPDX-License-Identifier: Apache-2.0
"""What all ranks' requests come to: operations that every member asks for, mismatches, ranks that wait for each other.

Values in, values out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankwise.compat.horovod.errors import HorovodInternalError
from rankwise.compat.horovod.negotiation.request import HAS_JOINED, Key, OperationRequest, request_from_json
from rankwise.errors import fold_ranks, fold_values

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


NEED_EVERY_RANK = ("allgather", "broadcast", "alltoall", "reducescatter")
"""The kinds that zeros of a rank that has joined cannot stand in for; Horovod refuses them too."""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What one rank brings to a round."""

    requests: tuple[OperationRequest, ...]
    mode: int
    waits: str = ""
    """What it waits for, in words."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What becomes of one name in a round."""

    request: OperationRequest
    error: HorovodInternalError | None = None


def to_json(state: RankState) -> dict[str, Any]:
    """Return a state as JSON takes it."""
    return {"requests": state.requests, "mode": state.mode, "waits": state.waits}


def from_json(value: dict[str, Any]) -> RankState:
    """Return the state that :func:`to_json` wrote."""
    requests = tuple(request_from_json(one) for one in value["requests"])
    return RankState(requests=requests, mode=value["mode"], waits=value["waits"])


def decide(states: Sequence[RankState], ranks_of_set: Mapping[int, Collection[int]]) -> list[Decision]:
    """Return what can be carried out, in the order in which every rank does so.

    Args:
        states: of every rank of the world.
        ranks_of_set: the members of each process set, by its number.
    """
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
            decisions.append(Decision(request=first, error=mismatch(request_of_rank)))
        elif missing <= joined and first.allows_joined:
            error = mismatch(request_of_rank) or _lost_in_join(first, missing)
            decisions.append(Decision(request=first, error=error))
    return decisions


def mismatch(request_of_rank: Mapping[int, OperationRequest]) -> HorovodInternalError | None:
    """Return the error of ranks that ask for different things under one name, or ``None``."""
    first, *others = request_of_rank.values()
    differing = [
        texts
        for texts, names in (
            ("numbers of tensors", ("num_tensors",)),
            ("data types", ("dtypes",)),
            ("operations", ("kind",)),
            ("shapes", ("shapes",)),
            ("prescale or postscale factors", ("prescale", "postscale")),
            ("reduction ops", ("op",)),
            ("root ranks", ("root",)),
            ("devices, CPU and GPU", ("device",)),
        )
        if any(_field(other, field) != _field(first, field) for other in others for field in names)
    ]
    if differing:
        return HorovodInternalError(
            f"{first.name!r} was called with different {differing[0]}.",
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
    """Return the error of ranks that all wait, each for an operation that another of them would have to call.

    Args:
        states: of every rank, by its number.
        ranks_of_set: the members of each process set, by its number.
        stuck: the ranks that cannot continue.
        others: ranks to be named besides: those that have come to their end.
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


def _field(request: OperationRequest, name: str) -> object:
    return len(request.shapes) if name == "num_tensors" else getattr(request, name)


def _lost_in_join(request: OperationRequest, missing: Collection[int]) -> HorovodInternalError | None:
    if request.kind not in NEED_EVERY_RANK:
        return None
    return HorovodInternalError(
        f"{request.name!r} needs every rank, and {fold_ranks(sorted(missing))} called join().",
        evidence=f"{request}; a rank that has called join() takes part in allreduce and barrier only",
        do="call it before any rank calls hvd.join(), or use allreduce; for sparse gradients pass "
        "hvd.DistributedOptimizer(sparse_as_dense=True)",
    )
