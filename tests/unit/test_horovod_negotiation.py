# SPDX-License-Identifier: Apache-2.0
"""Decisions from ranks' events, as values: which ranks take part in an operation, and which can never continue."""

from __future__ import annotations

import json

from rankwise.compat.horovod.request import HAS_JOINED, LEAVES, POLLS, WAITS, OperationRequest
from rankwise.compat.horovod.set_log import (
    HAS_LEFT,
    RUNS,
    EventOutcome,
    Negotiation,
    WaitEvent,
    event_from_json,
)

SETS = {0: (0, 1, 2, 3), 1: (0, 1), 2: (1, 2), 3: (3,)}


def asked(set_id: int, name: str) -> OperationRequest:
    return OperationRequest(kind="barrier", name=name, set_id=set_id)


def waits(rank: int, set_id: int, name: str, *others: OperationRequest, mode: int = WAITS) -> WaitEvent:
    requests = (asked(set_id, name), *others)
    return WaitEvent(rank=rank, mode=mode, awaited=(set_id, name), waits_text=f"waits for {name}", requests=requests)


def names(outcome: EventOutcome) -> list[str]:
    return [decision.request.name for decision in outcome.decisions]


def test_an_operation_is_decided_when_its_members_wait_for_anything() -> None:
    known = Negotiation(4)
    assert not names(known.apply(waits(0, 1, "a", asked(0, "all")), SETS))
    # Rank 1 has not asked for it; rank 2 is none of its members.
    assert not names(known.apply(waits(2, 2, "b"), SETS))
    assert known.blockers(0, SETS) == {1}
    assert names(known.apply(waits(1, 2, "b", asked(1, "a")), SETS)) == ["a", "b"]
    assert not any(known.waits(rank) for rank in range(4))


def test_a_rank_that_computes_takes_part_in_nothing() -> None:
    known = Negotiation(4)
    known.apply(waits(0, 1, "a"), SETS)
    # Rank 1 has asked for more than it waits for, and computes since.
    assert names(known.apply(waits(1, 1, "a", asked(2, "late")), SETS)) == ["a"]
    assert not names(known.apply(waits(2, 2, "late"), SETS))
    assert known.blockers(2, SETS) == {1}
    assert known.holds(1, (2, "late"))
    assert names(known.apply(waits(1, 1, "more"), SETS)) == ["late"]
    assert known.waits(1)
    assert not known.waits(2)


def test_polls_end_when_the_set_waits() -> None:
    known = Negotiation(4)
    known.apply(waits(0, 1, "x", mode=POLLS), SETS)
    assert known.waits(0)
    known.apply(waits(1, 2, "y"), SETS)
    assert not known.waits(0)
    assert known.waits(1)
    known.apply(WaitEvent(rank=0, mode=POLLS, awaited=(1, "x")), SETS)
    assert not known.waits(0), "rank 1 waits still"
    assert names(known.apply(waits(2, 2, "y"), SETS)) == ["y"]


def test_a_circle_of_ranks_is_found_while_others_compute() -> None:
    known = Negotiation(4)
    known.apply(waits(0, 1, "a"), SETS)
    assert known.apply(waits(2, 2, "c"), SETS).error is None
    outcome = known.apply(waits(1, 2, "b"), SETS)
    assert outcome.stuck == {0, 1, 2}
    assert "Ranks 0-2 cannot continue" in str(outcome.error)
    assert "'a' was not called on rank 1" in str(outcome.error)
    assert not any(known.waits(rank) for rank in range(4))
    # Each has withdrawn only the operation that it waited for.
    assert names(known.apply(waits(0, 1, "d"), SETS)) == []
    assert names(known.apply(waits(1, 1, "d"), SETS)) == ["d"]


def test_waiting_for_a_rank_that_has_left_is_an_error() -> None:
    known = Negotiation(4)
    known.apply(waits(1, 1, "a"), SETS)
    outcome = known.apply(WaitEvent(rank=0, mode=LEAVES, waits_text="has reached the end"), SETS)
    assert outcome.stuck == {1}
    assert "rank 0: has reached the end" in str(outcome.error)
    assert known.apply(waits(1, 0, "b"), SETS).stuck == {1}


def test_a_leaving_rank_stays_for_operations_that_others_may_still_reach() -> None:
    known = Negotiation(4)
    known.apply(WaitEvent(rank=0, mode=LEAVES, requests=(asked(1, "a"), asked(0, "all"))), SETS)
    assert known.waits(0)
    assert names(known.apply(waits(1, 1, "a"), SETS)) == ["a"]
    assert known.waits(0), "'all' may come"
    for rank in (1, 2, 3):
        known.apply(WaitEvent(rank=rank, mode=LEAVES), SETS)
    assert not known.waits(0)


def test_joined_ranks_count_in_all_their_sets_until_all_have_joined() -> None:
    known = Negotiation(4)
    known.apply(WaitEvent(rank=1, mode=HAS_JOINED), SETS)
    assert names(known.apply(waits(0, 1, "a"), SETS)) == ["a"]
    assert known.joined() == {1}
    outcomes = [known.apply(WaitEvent(rank=rank, mode=HAS_JOINED), SETS) for rank in (0, 2, 3)]
    assert [outcome.has_all_joined for outcome in outcomes] == [False, False, True]
    assert not any(known.waits(rank) for rank in range(4))


def test_an_abandoned_operation_is_not_decided() -> None:
    known = Negotiation(4)
    known.apply(waits(0, 1, "a"), SETS)
    known.apply(WaitEvent(rank=0, mode=RUNS), SETS)
    known.apply(WaitEvent(rank=0, mode=WAITS, awaited=(0, "b"), requests=(asked(0, "b"),), dropped=((1, "a"),)), SETS)
    assert known.apply(waits(1, 1, "a"), SETS).stuck == {0, 1}


def test_events_survive_json() -> None:
    event = WaitEvent(
        rank=2,
        mode=HAS_LEFT,
        awaited=(1, "a"),
        waits_text="w",
        requests=(OperationRequest(kind="allreduce", name="a", set_id=1, dtypes=("float32",), shapes=((2, 3),)),),
        dropped=((0, "b"),),
    )
    assert event_from_json(json.loads(json.dumps(event))) == event
