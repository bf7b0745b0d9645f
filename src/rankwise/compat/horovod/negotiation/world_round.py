# SPDX-License-Identifier: Apache-2.0
"""A round of the whole world: all ranks report what each has pending, and derive what can be carried out.

How operations are matched while there is no process set of some of the ranks: one small all-gather where all ranks
ask for the same. Else see :mod:`rankwise.compat.horovod.negotiation.set_decisions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rankwise.comm.collectives import gather_json
from rankwise.compat.horovod.negotiation.matching import Decision, RankState, decide, from_json, stalled, to_json
from rankwise.compat.horovod.negotiation.request import POLLS, WAITS, OperationRequest, digest_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.compat.horovod.errors import HorovodInternalError

# Different words: after an interrupt, ranks must not take one for the other.
_AT_A_GLANCE = "rankwise.compat.horovod, at a glance: what each rank has pending"
_WHAT = "rankwise.compat.horovod: what each rank has pending"


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """What a round has come to, the same on every rank."""

    modes: Sequence[int]
    """Why each rank waits."""
    decisions: Sequence[Decision]
    error: HorovodInternalError | None
    """Where every rank waits, and none can continue."""


def meet(exchange: Exchange | None, own: RankState, ranks_of_set: Mapping[int, Collection[int]]) -> RoundOutcome:
    """Report what is pending here, and return what is pending everywhere.

    Called by: every rank of the world.

    Args:
        exchange: of the world; ``None`` for a rank that is alone.
        own: what this rank has pending.
        ranks_of_set: the members of each process set, by its number.

    Raises:
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    modes, is_same = _glance(exchange, own.requests, own.mode)
    if is_same:
        return RoundOutcome(modes=modes, decisions=[Decision(request=request) for request in own.requests], error=None)
    states = [from_json(one) for one in gather_json(to_json(own), what=_WHAT)]
    decisions = decide(states, ranks_of_set)
    is_stuck = not decisions and POLLS not in modes
    error = stalled(dict(enumerate(states)), ranks_of_set, range(len(states))) if is_stuck else None
    return RoundOutcome(modes=modes, decisions=decisions, error=error)


def _glance(exchange: Exchange | None, requests: tuple[OperationRequest, ...], mode: int) -> tuple[list[int], bool]:
    """Return every rank's mode, and whether all ask for the same in the same order."""
    if exchange is None:
        return [mode], bool(requests) or mode != WAITS
    exchange.agree(_AT_A_GLANCE)
    rows = exchange.all_gather(torch.tensor([digest_of(requests), mode]), what=_AT_A_GLANCE).tolist()
    modes: list[int] = [mode for _, mode in rows]
    # Of ranks that have nothing pending, and come for different reasons, it has to be seen whether any can go on.
    has_reason = bool(requests) or POLLS in modes or len(set(modes)) == 1
    return modes, has_reason and len({digest for digest, _ in rows}) == 1
