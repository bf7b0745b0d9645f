# SPDX-License-Identifier: Apache-2.0
"""Events of a report: whose they are, and whether the run has failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rankwise.insight.run_records import RunRecords, events_of, failed_ranks
from rankwise.insight.step_record import Now, Record


def run(notes: list[list[dict[str, Any]]], *events: dict[str, Any]) -> RunRecords:
    """A run of one rank per list of notes, all started at the time 10."""
    now = Now(part=0, step_began=0.0, num_steps=0)
    ranks = [
        Record(facts={"rank": rank, "started": 10.0 + rank}, steps=[], notes=of_rank, now=now)
        for rank, of_rank in enumerate(notes)
    ]
    return RunRecords(folder=Path(), ranks=tuple(ranks), missing=(), num_restarts=0, events=events)


def event(time: float, text: str) -> dict[str, Any]:
    return {"kind": "event", "time": time, "text": text}


def failure(time: float, *ranks: int, is_of_another: bool = False) -> dict[str, Any]:
    return {"kind": "failure", "time": time, "text": "error", "ranks": [*ranks], "is_of_another": is_of_another}


def test_an_event_of_some_ranks_has_their_numbers() -> None:
    of_two = run([[event(12.0, "slow")], [event(11.0, "saved a"), event(13.0, "slow")], [event(11.5, "saved a")]])
    assert events_of(of_two) == [(11.0, "ranks 1-2: saved a"), (12.0, "ranks 0-1: slow")]
    assert events_of(run([[event(12.0, "slow")], []])) == [(12.0, "rank 0: slow")]


def test_an_event_of_all_ranks_is_one_each_time() -> None:
    twice = [event(11.0, "saved a"), event(21.0, "saved a")]
    assert events_of(run([twice, [event(11.1, "saved a"), event(20.9, "saved a")]])) == [
        (11.0, "saved a"),
        (20.9, "saved a"),
    ]
    assert events_of(run([[event(12.0, "slow")]], event(11.0, "1 rank on this machine\n"), event(12.0, ""))) == [
        (11.0, "1 rank on this machine"),
        (12.0, "slow"),
    ]


def test_the_first_failure_of_the_last_attempt_counts() -> None:
    assert failed_ranks(run([[], []])) is None
    told = {"kind": "failure", "text": "", "rank": 1}
    assert failed_ranks(run([[], []], {**told, "time": 9.0})) is None, "of the attempt before"
    assert failed_ranks(
        run([[], []], {**told, "time": 9.0}, {**told, "time": 12.0}, {**told, "time": 14.0, "rank": 0})
    ) == (1,)


def test_the_error_of_a_rank_comes_before_those_that_follow_from_it() -> None:
    notes = [[failure(11.0, 2, is_of_another=True)], [failure(12.0, 1)], [failure(13.0, 2)]]
    assert failed_ranks(run(notes)) == (1,)
    assert failed_ranks(run([notes[0], []])) == (2,), "it was killed, and has noted nothing"
    assert failed_ranks(run([[failure(11.0, is_of_another=True)], []])) == ()
