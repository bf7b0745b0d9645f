# SPDX-License-Identifier: Apache-2.0
"""The coordinator's rules for optional ranks."""

from __future__ import annotations

import pytest
from coordinated import Scene, failed, report_of, text_to

from rankwise.errors import PeerFailed
from rankwise.health.event_log import Failed, StopRequested
from rankwise.launch.controller.coordinator import (
    LOST_SECONDS,
    PEERS_SECONDS,
    Disconnect,
    Phase,
)
from rankwise.launch.messages import EndJob, ShowText, StopAttempt, StopRank, Wait
from rankwise.launch.report import failure, failure_report


def scene_with_expendable(*ranks: int, nodes: tuple[int, int] = (2, 2), max_restarts: int = 0) -> Scene:
    """Return two machines of two ranks each, of which some may go."""
    scene = Scene(nodes, max_restarts)
    scene.node_joined("a")
    scene.node_joined("b")
    scene.coordinator.set_optional_ranks(0, ranks)
    return scene


def test_the_failure_of_an_optional_rank_is_reported_and_tolerated() -> None:
    scene = scene_with_expendable(1, 2, 3, max_restarts=1)
    killed = failure.from_exit(2, -9, 1.0)
    scene.coordinator.rank_failed("b", 0, killed)
    stop = StopRank(attempt=0, rank=2, settle_seconds=PEERS_SECONDS)
    assert scene.sent() == [("b", stop)], "a rank that has failed may not end by itself"
    assert text_to("a", scene) == "[rankwise] rank 2 failed (SIGKILL); the others continue without it\n"
    assert [(type(event), event.rank) for _, event in scene.events] == [(Failed, 2)]
    error = ValueError("bad sample\nsecond line")
    scene.rank_failed("b", 0, error, 3)
    assert text_to("a", scene).startswith(
        "[rankwise] rank 3 failed (ValueError: bad sample); the others continue without it\n"
    )
    assert text_to("a", scene).endswith("ValueError: bad sample\nsecond line\n")
    scene.ranks_ended("a", 0)
    scene.ranks_ended("b", 0, killed, failed(error, 3))
    assert [one.exit_code for _, one in scene.sent(EndJob)] == [0, 0]
    assert text_to("a", scene) == (
        "[rankwise] rank 2 failed earlier: SIGKILL; rank 3 failed earlier: ValueError: bad sample; "
        "the others succeeded\n"
    )


def test_a_stopped_optional_rank_is_killed_immediately_and_an_echo_reports_it() -> None:
    scene = scene_with_expendable(1, 2, 3)
    scene.coordinator.rank_failed("b", 0, failure.from_stop(3, 6.0, 1.0))
    assert [(type(one), one.settle_seconds) for _, one in scene.sent()] == [(StopRank, 0.0)]
    scene.rank_failed("b", 0, PeerFailed("rank 3 failed", rank=3), 2)
    assert [event.rank for _, event in scene.events] == [2]


@pytest.mark.parametrize(("max_restarts", "settle_seconds"), [(0, PEERS_SECONDS), (1, 0.0)])
def test_the_last_optional_rank_and_any_other_rank_end_the_job(max_restarts: int, settle_seconds: float) -> None:
    for dying in (3, 0):
        scene = scene_with_expendable(2, 3, max_restarts=max_restarts)
        if dying == 3:
            scene.rank_failed("b", 0, ValueError("borne"), 2)
        stops = scene.rank_failed("a" if dying == 0 else "b", 0, ValueError("the end"), dying)
        assert [(type(one), one.settle_seconds) for _, one in stops] == [(StopAttempt, settle_seconds)] * 2
        scene.ranks_ended("a", 0)
        scene.ranks_ended("b", 0)
        report = report_of(scene.sent())
        assert report.first.rank == dying
        if dying == 3:
            text = failure_report.whole(report)
            assert "[rankwise] rank 2 failed earlier: ValueError: borne\n" in text
            assert "rank 3 of 4 (b) failed: ValueError: the end\n" in text


def test_one_that_fails_after_the_others_have_ended_well_is_borne() -> None:
    scene = scene_with_expendable(2, 3)
    scene.coordinator.rank_departed(0, 2)
    scene.sent()
    said = scene.rank_failed("b", 0, ValueError("late"), 3)
    assert [type(one) for _, one in said if not isinstance(one, ShowText)] == [StopRank]


def test_a_tolerated_failure_is_blamed_for_its_echo() -> None:
    scene = scene_with_expendable(2, 3)
    scene.rank_failed("b", 0, ValueError("borne"), 2)
    scene.rank_failed("a", 0, PeerFailed("rank 2 failed", rank=2), 0)
    scene.ranks_ended("a", 0)
    scene.ranks_ended("b", 0)
    messages = scene.sent()
    assert [one.rank for one in report_of(messages).failures] == [2, 0]
    assert [one.exit_code for _, one in messages if isinstance(one, EndJob)] == [1, 1]


def test_a_lost_machine_of_optional_ranks_is_tolerated_and_waits_when_it_returns() -> None:
    scene = scene_with_expendable(1, 2, 3, max_restarts=1)
    scene.heartbeat_all_but("b", seconds=LOST_SECONDS + 1)
    assert scene.sent() == [("b", Disconnect())]
    assert "[rankwise] ranks 2-3 failed (b was lost: " in text_to("a", scene)
    assert "; the others continue without them\n" in text_to("a", scene)
    assert [(type(event), event.rank) for _, event in scene.events] == [(Failed, 2), (Failed, 3)]
    assert scene.node_joined("new b") == [("new b", Wait())]
    scene.ranks_ended("a", 0)
    assert [(to, one.exit_code) for to, one in scene.sent(EndJob)] == [("a", 0)]


@pytest.mark.parametrize("expendable", [(2,), (2, 3)])
def test_a_lost_machine_with_another_rank_or_all_that_may_go_ends_all(expendable: tuple[int, ...]) -> None:
    scene = scene_with_expendable(*expendable)
    scene.coordinator.node_lost("b", scene.now, "is gone")
    assert [to for to, _ in scene.sent(StopAttempt)] == ["a"]


def test_an_elastic_job_grows_and_restarts_with_all_that_it_lost() -> None:
    scene = scene_with_expendable(1, 2, 3, nodes=(1, 2))
    scene.coordinator.node_lost("b", scene.now, "is gone")
    assert scene.sent(StopAttempt) == []
    scene.node_joined("new b")
    assert [type(event) for _, event in scene.events] == [StopRequested], "the ranks save for the machine that has come"
    scene.ranks_ended("a", 0, has_stopped=True)
    assert scene.starts() == {"a": (1, 0, 4), "new b": (1, 2, 4)}
    scene.coordinator.set_optional_ranks(0, [2, 3])
    assert scene.rank_failed("new b", 1, ValueError("boom"), 2) != [], "an attempt declares anew who may go"
    assert scene.coordinator.phase is Phase.STOPPING
