# SPDX-License-Identifier: Apache-2.0
"""The record of a rank's last collectives, and its report."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankwise.health import call_site
from rankwise.health.event_log import StatusPoll
from rankwise.health.flight_recorder import EVERYONE, LENGTH, FlightRecorder

HERE = Path(__file__).name


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)


def _asked(recorder: FlightRecorder, **asked: Any) -> dict[str, object]:
    return recorder.situation({}, threading.get_ident(), StatusPoll(1, **asked))


def test_a_collective_is_noted_with_the_users_line() -> None:
    recorder = FlightRecorder()
    ticket = recorder.begin("barrier()")
    line = _line_of('ticket = recorder.begin("barrier()")')
    assert call_site.words(ticket.site) == f"{HERE}:{line} in test_a_collective_is_noted_with_the_users_line"


def test_a_line_in_a_library_is_not_the_users() -> None:
    recorder = FlightRecorder()
    called_back = SimpleNamespace(ticket=None)
    thread = threading.Thread(target=lambda: setattr(called_back, "ticket", recorder.begin("x")))
    thread.start()
    thread.join()
    assert call_site.words(called_back.ticket.site).endswith("in <lambda>"), (
        "of the thread's frames, threading.py is not"
    )


def test_only_the_last_are_kept_and_all_are_counted() -> None:
    recorder = FlightRecorder()
    for number in range(LENGTH + 5):
        recorder.begin(f"number {number}").ended = 1.0
    told = _asked(recorder, sequence=10)
    assert told["last"] == LENGTH + 5
    assert told["count"] == LENGTH + 5
    assert told["what"] == f"number {LENGTH + 4}"
    assert told["is_over"] is True
    assert len(told["digests"]) == LENGTH  # type: ignore[arg-type]
    assert told["entry"][0] == "number 9"  # type: ignore[index]
    assert "entry" not in _asked(recorder, sequence=3), "it is forgotten"


def test_each_channel_counts_for_itself() -> None:
    recorder = FlightRecorder()
    exchange_id = recorder.new_exchange_id()
    recorder.begin("on the first")
    recorder.begin("on the second", exchange_id)
    ticket = recorder.begin("on the second", exchange_id)
    assert (ticket.number, ticket.sequence) == (3, 2)
    assert _asked(recorder)["count"] == 1
    assert _asked(recorder, exchange=recorder.name_of(exchange_id))["count"] == 2
    assert _asked(recorder, exchange="all, 7")["count"] == 0, "this rank has not come to open it"


def test_an_exchange_has_one_name_on_all_its_members() -> None:
    """Rank 1 is in two exchanges with rank 0 that rank 2 does not know of, before all three open one."""
    zero, one, two = (FlightRecorder() for _ in range(3))
    pair = [(each.new_exchange_id([0, 1]), each.new_exchange_id([1, 0])) for each in (zero, one)]
    assert [zero.name_of(own) for own in pair[0]] == [one.name_of(own) for own in pair[1]]
    other = two.new_exchange_id([2, 3])
    three = [each.name_of(each.new_exchange_id([0, 1, 2])) for each in (zero, one, two)]
    every = [each.name_of(each.new_exchange_id()) for each in (zero, one, two)]
    assert len(set(three)) == len(set(every)) == 1
    assert len({*map(zero.name_of, pair[0]), two.name_of(other), *three, *every, EVERYONE}) == 6
    ticket = one.begin("x", pair[1][1])
    told = one.situation({1: ticket}, 1, StatusPoll(1))
    assert told["blocked"] == {"exchange": zero.name_of(pair[0][1]), "sequence": 1, "members": [0, 1]}


def test_only_the_thread_that_trains_is_blocked() -> None:
    recorder = FlightRecorder()
    told = recorder.situation({2: recorder.begin("of a saving thread")}, 1, StatusPoll(1))
    assert (told["blocked"], told["waiting"], told["what"]) == (None, True, "of a saving thread")


@pytest.mark.parametrize(
    ("stacks", "sequence", "is_told"), [("missing", 1, False), ("missing", 2, True), ("all", 1, True)]
)
def test_the_stack_is_reported_on_request(stacks: str, sequence: int, *, is_told: bool) -> None:
    recorder = FlightRecorder()
    recorder.begin("barrier()")
    stack = _asked(recorder, sequence=sequence, stacks=stacks).get("stack", [])
    assert any("test_the_stack_is_reported_on_request" in frame for frame in stack) is is_told  # type: ignore[attr-defined]


def test_a_stack_is_never_longer_than_it_may_be() -> None:
    def deeper(number: int) -> list[str]:
        return deeper(number - 1) if number else call_site.stack_of_thread(threading.get_ident())

    assert len(deeper(100)) == call_site.LONGEST_STACK
