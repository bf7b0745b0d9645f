# SPDX-License-Identifier: Apache-2.0
"""What the coordinator decides, as values: no machine, no clock."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from coordinated import TIMEOUT_SECONDS, Scene, failed, report_of, text_to

from rankwise.errors import PeerFailed
from rankwise.health.event_log import Failed, StopRequested
from rankwise.launch.controller.coordinator import (
    CAUSE_SECONDS,
    GROW_SECONDS,
    LAST_CALL_SECONDS,
    LOST_SECONDS,
    PEERS_SECONDS,
    RETURN_SECONDS,
    STARTING_SECONDS,
    Disconnect,
    Phase,
)
from rankwise.launch.messages import EndJob, Node, Refuse, ReportFailure, RequestStop, StopAttempt, Wait
from rankwise.launch.report import failure


def test_a_job_starts_when_all_machines_have_come() -> None:
    scene = Scene((2, 2))
    assert scene.node_joined("a", ranks=3) == []
    scene.coordinator.node_joined(Node(node_id="b", hostname="b", num_ranks=2), 1.0)
    assert scene.starts() == {"a": (0, 0, 5), "b": (0, 3, 5)}
    scene.ranks_ended("a", 0)
    scene.ranks_ended("b", 0)
    assert [one.exit_code for _, one in scene.sent(EndJob)] == [0, 0]
    assert scene.coordinator.phase is Phase.OVER


def test_a_launcher_of_another_version_is_refused() -> None:
    scene = Scene((2, 2))
    scene.node_joined("a", rankwise="0.1.0")
    ((to, refusal),) = scene.node_joined("b", rankwise="9")
    assert (to, refusal.evidence) == ("b", "rankwise: a has 0.1.0, b has 9")


def test_given_numbers_count_not_the_order_of_coming() -> None:
    scene = Scene((2, 2))
    scene.node_joined("a", node_rank=1)
    scene.coordinator.node_joined(Node(node_id="b", hostname="b", num_ranks=2, node_rank=0), 1.0)
    assert scene.starts() == {"b": (0, 0, 4), "a": (0, 2, 4)}


def test_the_machine_that_serves_the_job_is_the_first_whenever_it_joins() -> None:
    scene = Scene((2, 2))
    scene.node_joined("a")
    scene.coordinator.node_joined(Node(node_id="b", hostname="b", num_ranks=2, serves=True), 1.0)
    assert scene.starts() == {"b": (0, 0, 4), "a": (0, 2, 4)}


def test_an_elastic_job_waits_a_while_for_more_machines() -> None:
    scene = Scene((1, 3))
    scene.node_joined("a")
    scene.heartbeat_all_but("b", "c", seconds=LAST_CALL_SECONDS - 1)
    assert scene.starts() == {}
    scene.heartbeat_all_but("b", "c", seconds=2)
    assert scene.starts() == {"a": (0, 0, 2)}


def test_a_machine_that_never_comes_is_named() -> None:
    scene = Scene((2, 2))
    scene.node_joined("a", node_rank=0)
    scene.heartbeat_all_but(seconds=TIMEOUT_SECONDS + 1)
    ((_, end),) = scene.sent(EndJob)
    assert (end.exit_code, end.what) == (1, "node 1 never joined: waited 100 s at host0:29400.")
    assert "here: a" in end.evidence


def test_enough_machines_are_not_given_up_while_more_are_waited_for() -> None:
    scene = Scene((1, 3))
    scene.heartbeat_all_but("a", "b", "c", seconds=TIMEOUT_SECONDS - 1)
    scene.node_joined("a")
    scene.heartbeat_all_but("b", "c", seconds=LAST_CALL_SECONDS - 1)
    assert scene.coordinator.phase is Phase.GATHERING, "the time for the first has passed, and it has come"
    scene.heartbeat_all_but("b", "c", seconds=2)
    assert scene.starts() == {"a": (0, 0, 2)}


@pytest.mark.parametrize(("least", "waits"), [(1, False), (2, True)])
def test_nodes_are_waited_for_only_where_too_few_are_left(least: int, waits: bool) -> None:
    scene = Scene((least, 3), max_restarts=1)
    scene.node_joined("a")
    scene.node_joined("b")
    scene.heartbeat_all_but("c", seconds=LAST_CALL_SECONDS + 1)
    scene.sent()
    scene.coordinator.node_lost("b", scene.now, "is gone")
    scene.ranks_ended("a", 0)
    assert (scene.starts() == {}) is waits
    assert ("waiting up to 30 s for nodes to rejoin" in text_to("a", scene)) is waits


def test_a_machine_that_restarts_uses_a_restart_if_all_are_needed() -> None:
    scene = Scene((2, 2), max_restarts=1)
    scene.node_joined("a")
    scene.node_joined("b")
    scene.sent()
    for attempt in range(2):
        scene.node_joined("b")
        scene.ranks_ended("a", attempt)
    messages = scene.sent()
    assert [one.exit_code for _, one in messages if isinstance(one, EndJob)] == [1, 1]
    assert report_of(messages).first.type == "lost"


@pytest.mark.parametrize(
    ("second", "words", "evidence"),
    [
        ({"node_rank": 0}, "Two machines are node 0: a and b.", "last heartbeat of a: 0.0 s ago"),
        ({"script": "other"}, "b and a do not run the same job.", "script: a has one, b has other"),
        ({"rankwise": "0.2"}, "b and a do not run the same job.", "rankwise: a has 0.1, b has 0.2"),
    ],
)
def test_a_machine_that_contradicts_is_refused(second: dict[str, Any], words: str, evidence: str) -> None:
    scene = Scene((2, 2))
    job: dict[str, Any] = {"script": "one", "rankwise": "0.1"}
    scene.node_joined("a", node_rank=0, **job)
    ((to, refusal),) = scene.node_joined("b", **{"node_rank": 1, **job, **second})
    assert (to, type(refusal), refusal.what, refusal.evidence) == ("b", Refuse, words, evidence)
    assert refusal.advice
    scene.node_joined("c", node_rank=1, **job)
    assert scene.node_joined("d", node_rank=None, **job)[0][1].what == "The job already has all its 2 nodes."


def test_a_failure_without_restarts_lets_the_others_end_and_names_the_cause() -> None:
    scene = Scene((2, 2))
    scene.node_joined("a")
    scene.node_joined("b")
    stops = scene.rank_failed("b", 0, ValueError("boom"), 3)
    assert [(to, one.settle_seconds) for to, one in stops] == [("a", PEERS_SECONDS), ("b", PEERS_SECONDS)]
    assert [(number, type(event), event.rank) for number, event in scene.events] == [(0, Failed, 3)]
    scene.ranks_ended("a", 0, failed(PeerFailed("rank 3 failed", rank=3), 0))
    scene.ranks_ended("b", 0, failed(ValueError("boom"), 3))
    messages = scene.sent()
    report = next(one.failed for _, one in messages if isinstance(one, ReportFailure))
    assert (report.first.rank, report.hostname) == (3, "b")
    assert [one.exit_code for _, one in messages if isinstance(one, EndJob)] == [1, 1]


def test_a_failure_with_restarts_left_ends_the_others_at_once() -> None:
    scene = Scene((2, 2), max_restarts=1)
    scene.node_joined("a")
    scene.node_joined("b")
    assert [one.settle_seconds for _, one in scene.rank_failed("a", 0, ValueError("boom"), 0)] == [0.0, 0.0]
    scene.ranks_ended("a", 0, failed(ValueError("boom"), 0))
    assert scene.starts() == {}, "the ranks of b may still be there"
    scene.ranks_ended("b", 0)
    assert scene.starts() == {"a": (1, 0, 4), "b": (1, 2, 4)}
    scene.rank_failed("b", 1, ValueError("again"), 2)
    scene.ranks_ended("a", 1)
    scene.ranks_ended("b", 1, failed(ValueError("again"), 2))
    assert [one.exit_code for _, one in scene.sent(EndJob)] == [1, 1]


def test_the_cause_of_an_echo_is_waited_for() -> None:
    scene = Scene((2, 2), max_restarts=1)
    scene.node_joined("a")
    scene.node_joined("b")
    echo = PeerFailed("rank 3 failed", rank=3)
    assert {one.settle_seconds for _, one in scene.rank_failed("a", 0, echo, 0)} == {CAUSE_SECONDS}
    assert scene.events == [], "an echo is news to nobody"


def test_a_job_continues_without_a_lost_machine_and_uses_no_restart() -> None:
    scene = Scene((1, 2))
    scene.node_joined("a")
    scene.node_joined("b")
    scene.heartbeat_all_but("b", seconds=LOST_SECONDS + 1)
    assert [(to, type(one)) for to, one in scene.sent()] == [("b", Disconnect), ("a", StopAttempt)]
    assert [(type(event), event.rank) for _, event in scene.events] == [(Failed, 2), (Failed, 3)]
    scene.ranks_ended("a", 0, failed(PeerFailed("rank 2 failed", rank=2), 0))
    assert scene.starts() == {"a": (1, 0, 2)}


def test_time_in_which_the_coordinator_was_stopped_counts_against_no_machine() -> None:
    scene = Scene((1, 2))
    scene.node_joined("a")
    scene.node_joined("b")
    scene.sent()
    scene.now += 10 * LOST_SECONDS
    scene.coordinator.tick(scene.now)
    assert scene.sent() == []
    scene.heartbeat_all_but("b", seconds=LOST_SECONDS + 1)
    assert ("b", Disconnect()) in scene.sent()


def test_a_machine_that_restarts_before_its_end_is_noticed_is_asked_to_wait() -> None:
    scene = Scene((2, 2), max_restarts=1)
    scene.node_joined("a", node_rank=0)
    scene.node_joined("b", node_rank=1)
    scene.heartbeat_all_but("b", seconds=LOST_SECONDS / 2)
    scene.sent()
    assert scene.node_joined("new b", node_rank=1) == [("new b", Wait())]
    scene.heartbeat_all_but("b", seconds=LOST_SECONDS)
    scene.ranks_ended("a", 0)
    scene.node_joined("new b", node_rank=1)
    assert scene.coordinator.phase is Phase.RUNNING


def test_the_first_failure_received_leads_whatever_the_clocks_say() -> None:
    scene = Scene((2, 2))
    scene.node_joined("a")
    scene.node_joined("b")
    first, second = failed(ValueError("first"), 2), failed(ValueError("second"), 0)
    ahead = replace(first, time=first.time + 3600)
    scene.coordinator.rank_failed("b", 0, ahead)
    scene.ranks_ended("a", 0, second)
    scene.ranks_ended("b", 0, ahead)
    report = next(one.failed for _, one in scene.sent() if isinstance(one, ReportFailure))
    assert report.first.rank == 2


def test_the_serving_machine_is_not_lost_by_its_own_silence() -> None:
    scene = Scene((1, 2))
    scene.coordinator.node_joined(Node(node_id="a", hostname="a", num_ranks=2, serves=True), scene.now)
    scene.node_joined("b")
    scene.heartbeat_all_but("a", seconds=LOST_SECONDS + 1)
    assert scene.sent() == []


def test_a_short_silence_is_no_loss() -> None:
    scene = Scene((1, 2))
    scene.node_joined("a")
    scene.node_joined("b")
    scene.heartbeat_all_but("b", seconds=LOST_SECONDS - 1)
    scene.heartbeat_all_but(seconds=3)
    assert scene.sent() == []


def test_a_job_that_needs_a_lost_machine_waits_for_it_and_ends() -> None:
    scene = Scene((2, 2), max_restarts=3)
    scene.node_joined("a")
    scene.node_joined("b")
    scene.coordinator.node_lost("b", scene.now, "is gone")
    scene.ranks_ended("a", 0)
    scene.sent()
    scene.heartbeat_all_but("b", seconds=RETURN_SECONDS - 1)
    assert scene.sent() == []
    scene.heartbeat_all_but("b", seconds=2)
    ((_, end),) = scene.sent(EndJob)
    assert "never rejoined: waited 30 s" in end.what


@pytest.mark.parametrize("is_loss_known", [True, False])
def test_a_lost_machine_that_has_announced_itself_is_waited_for_longer(*, is_loss_known: bool) -> None:
    scene = Scene((2, 2), max_restarts=3)
    scene.node_joined("a")
    scene.node_joined("b")
    if not is_loss_known:
        scene.coordinator.node_starting("b", scene.now)
    scene.coordinator.node_lost("b", scene.now, "is gone")
    scene.ranks_ended("a", 0)
    if is_loss_known:
        scene.coordinator.node_starting("b", scene.now)
    scene.sent()
    assert ("b has started and is getting ready" in text_to("a", scene)) is is_loss_known
    scene.heartbeat_all_but("b", seconds=STARTING_SECONDS - 1)
    assert scene.sent() == []
    scene.heartbeat_all_but("b", seconds=2)
    ((_, end),) = scene.sent(EndJob)
    assert "never rejoined: waited 120 s" in end.what


def test_a_machine_that_crashes_at_each_start_extends_the_wait_once() -> None:
    scene = Scene((2, 2), max_restarts=3)
    scene.node_joined("a")
    scene.node_joined("b")
    scene.coordinator.node_lost("b", scene.now, "is gone")
    scene.ranks_ended("a", 0)
    for _ in range(4):
        scene.coordinator.node_starting("b", scene.now)
        scene.heartbeat_all_but("b", seconds=STARTING_SECONDS / 4 - 1)
    assert scene.sent(EndJob) == []
    scene.coordinator.node_starting("b", scene.now)
    scene.heartbeat_all_but("b", seconds=5)
    ((_, end),) = scene.sent(EndJob)
    assert "never rejoined: waited 120 s" in end.what


def test_an_announcement_counts_until_the_next_attempt() -> None:
    scene = Scene((2, 2), max_restarts=3)
    scene.coordinator.node_starting("b", scene.now)
    scene.node_joined("a")
    scene.node_joined("b")
    scene.coordinator.node_lost("b", scene.now, "is gone")
    scene.ranks_ended("a", 0)
    scene.sent()
    scene.heartbeat_all_but("b", seconds=RETURN_SECONDS + 1)
    ((_, end),) = scene.sent(EndJob)
    assert "never rejoined: waited 30 s" in end.what


def test_a_lost_machine_that_comes_back_in_time_is_taken_in() -> None:
    scene = Scene((2, 2), max_restarts=3)
    scene.node_joined("a")
    scene.node_joined("b")
    scene.coordinator.node_lost("b", scene.now, "is gone")
    scene.ranks_ended("a", 0)
    scene.sent()
    scene.coordinator.node_joined(Node(node_id="b", hostname="b", num_ranks=2), scene.now + 5)
    assert scene.starts() == {"a": (1, 0, 4), "b": (1, 2, 4)}


def test_without_restarts_a_lost_machine_ends_the_job() -> None:
    scene = Scene((2, 2))
    scene.node_joined("a")
    scene.node_joined("b")
    scene.coordinator.node_lost("b", scene.now, "is gone")
    assert {one.settle_seconds for _, one in scene.sent(StopAttempt)} == {PEERS_SECONDS}
    scene.ranks_ended("a", 0, failed(PeerFailed("rank 2 failed", rank=2), 0))
    messages = scene.sent()
    report = next(one.failed for _, one in messages if isinstance(one, ReportFailure))
    assert (report.first.rank, report.first.type) == (2, "lost")
    assert [(to, one.exit_code) for to, one in messages if isinstance(one, EndJob)] == [("a", 1)]


def test_one_rank_alone_is_asked_by_its_launcher() -> None:
    scene = Scene((1, 1))
    scene.node_joined("a", ranks=1)
    scene.coordinator.request_stop("SIGUSR2")
    assert scene.sent(RequestStop) == [("a", RequestStop(reason="SIGUSR2"))]
    assert scene.events == []


def test_a_machine_that_comes_later_is_taken_in_where_the_ranks_can_save() -> None:
    scene = Scene((1, 2))
    scene.node_joined("a")
    scene.heartbeat_all_but("b", "c", seconds=LAST_CALL_SECONDS + 1)
    scene.sent()
    scene.node_joined("b")
    assert [(number, type(event)) for number, event in scene.events] == [(0, StopRequested)]
    scene.ranks_ended("a", 0, has_stopped=True)
    assert scene.starts() == {"a": (1, 0, 4), "b": (1, 2, 4)}


def test_a_machine_that_comes_and_goes_ends_no_ranks() -> None:
    scene = Scene((1, 2))
    scene.node_joined("a")
    scene.heartbeat_all_but("b", "c", seconds=LAST_CALL_SECONDS + 1)
    scene.node_joined("b")
    scene.coordinator.node_lost("b", scene.now, "is gone")
    scene.heartbeat_all_but("b", "c", seconds=GROW_SECONDS + 1)
    assert scene.sent(StopAttempt) == []
    scene.ranks_ended("a", 0, has_stopped=True)
    assert scene.starts() == {"a": (1, 0, 2)}, "asked to save, the ranks ended, and go on"


def test_ranks_that_do_not_save_are_ended_for_a_machine_that_comes() -> None:
    scene = Scene((1, 2))
    scene.node_joined("a")
    scene.heartbeat_all_but("b", "c", seconds=LAST_CALL_SECONDS + 1)
    scene.node_joined("b")
    scene.heartbeat_all_but("c", seconds=GROW_SECONDS + 1)
    assert [to for to, _ in scene.sent(StopAttempt)][:1] == ["a"]
    scene.ranks_ended("a", 0)
    assert set(scene.starts()) == {"a", "b"}


def test_ranks_that_finish_before_they_could_save_end_the_job() -> None:
    scene = Scene((1, 2))
    scene.node_joined("a")
    scene.heartbeat_all_but("b", "c", seconds=LAST_CALL_SECONDS + 1)
    scene.node_joined("b")
    scene.ranks_ended("a", 0)
    assert [(to, one.exit_code) for to, one in scene.sent(EndJob)] == [("a", 0), ("b", 0)]


def test_being_asked_to_stop_ends_the_job_as_one_to_be_tried_again() -> None:
    scene = Scene((1, 1), max_restarts=5)
    scene.node_joined("a")
    scene.coordinator.request_stop("SIGUSR2")
    scene.sent()
    assert [(number, event.reason) for number, event in scene.events] == [(0, "SIGUSR2")]
    scene.ranks_ended("a", 0, has_stopped=True)
    assert [one.exit_code for _, one in scene.sent(EndJob)] == [75]


def test_being_asked_to_stop_outlives_a_failure() -> None:
    scene = Scene((1, 1), max_restarts=5)
    scene.node_joined("a")
    scene.coordinator.request_stop("SIGUSR2")
    scene.rank_failed("a", 0, ValueError("boom"), 0)
    scene.ranks_ended("a", 0, failed(ValueError("boom"), 0))
    assert [one.exit_code for _, one in scene.sent(EndJob)] == [75]


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 75), (signal.SIGSEGV, 139)])
def test_a_rank_of_an_evicted_pod_that_cannot_save_leaves_the_job_one_to_be_tried_again(
    number: signal.Signals, expected: int
) -> None:
    scene = Scene((1, 1))
    scene.node_joined("a")
    scene.coordinator.request_stop("SIGTERM")
    scene.ranks_ended("a", 0, failure.from_exit(1, -number, 5.0))
    assert [one.exit_code for _, one in scene.sent(EndJob)] == [expected]


@pytest.mark.parametrize(("nodes", "goes_on"), [((1, 2), True), ((2, 2), False)])
def test_a_machine_that_is_asked_to_end(nodes: tuple[int, int], *, goes_on: bool) -> None:
    scene = Scene(nodes)
    scene.node_joined("a")
    scene.node_joined("b")
    scene.coordinator.node_leaves("b", "SIGTERM", 143, scene.now, ends_job=False)
    scene.ranks_ended("a", 0)
    assert (set(scene.starts()) == {"a"}) is goes_on
    assert (scene.coordinator.phase is Phase.OVER) is not goes_on


def test_messages_about_an_attempt_that_is_over_are_ignored() -> None:
    scene = Scene((1, 1), max_restarts=1)
    scene.node_joined("a")
    scene.rank_failed("a", 0, ValueError("boom"), 0)
    scene.ranks_ended("a", 0, failed(ValueError("boom"), 0))
    assert scene.starts() == {"a": (1, 0, 2)}
    assert scene.rank_failed("a", 0, ValueError("late"), 1) == []
    scene.ranks_ended("a", 0, failed(ValueError("late"), 1))
    assert scene.coordinator.phase is Phase.RUNNING
