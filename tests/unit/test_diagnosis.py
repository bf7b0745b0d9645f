# SPDX-License-Identifier: Apache-2.0
"""What is said when a wait cannot end: the words, for given answers."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from rankwise.errors import CollectiveMismatch, PeerFailed, PeerMissing
from rankwise.health import collective_mismatch, diagnosis
from rankwise.health.collective_mismatch import CollectiveCall, calls_differ
from rankwise.health.event_log import Failed, Left, ProcessEnded
from rankwise.health.flight_recorder import EVERYONE
from rankwise.world.facts import World


def _world() -> World:
    return World(
        rank=0,
        world_size=4,
        local_rank=0,
        local_world_size=2,
        node_rank=0,
        num_nodes=2,
        device="cpu",
        backend="gloo",
        hostname="gpu-01",
        source="env",
    )


def _waiting(
    what: str, seconds: float, *, host: str = "gpu-01", exchange: str = EVERYONE, count: int = 7
) -> dict[str, Any]:
    return {
        "host": host,
        "step": 12,
        "last": count,
        "waiting": True,
        "exchange": exchange,
        "count": count,
        "what": what,
        "is_over": False,
        "at": "train.py:40 in main",
        "seconds": seconds,
        "digests": {count: hash(what)},
    }


RUNNING = {
    **_waiting("barrier()", 612.0, count=6),
    "waiting": False,
    "exchange": None,
    "is_over": True,
    "at": "train.py:33 in load",
    "stack": ["/home/me/train.py:90 in <module>", "/home/me/train.py:33 in load"],
}


def test_the_verdict_is_a_table_and_the_stacks_of_the_missing() -> None:
    what = 'all_reduce("sum", float32[2])'
    answers = {
        0: _waiting(what, 600.2),
        1: RUNNING,
        2: _waiting(what, 598.7, host="gpu-02"),
        3: {"silent": "stopped (SIGSTOP)", "host": "gpu-02"},
    }
    error = diagnosis.of_event(_world(), diagnosis.of_answers(what, 600.2, answers, 7, range(4)))
    assert isinstance(error, PeerMissing)
    assert error.ranks == (1, 3)
    assert [re.split(" {2,}", line.strip()) for line in str(error).splitlines()] == [
        ['all_reduce("sum", float32[2]) timed out after 600.2 s waiting for ranks 1, 3.'],
        ["on", "reported on [rank 0/4 on gpu-01]"],
        ["evidence", "rank", "host", "step", "collective", "at", "for"],
        ["ranks 0, 2", "gpu-01, gpu-02", "12", f"waiting in {what}", "train.py:40 in main", "599-600 s"],
        ["rank 1", "gpu-01", "12", "after barrier()", "train.py:33 in load", "612 s"],
        ["rank 3", "gpu-02", "-", "no answer", "-", "stopped (SIGSTOP)"],
        ["stack of rank 1, innermost line last:"],
        ["/home/me/train.py:90 in <module>"],
        ["/home/me/train.py:33 in load"],
        ["do", str(error.do)],
    ]


def test_ranks_that_all_wait_for_different_things_called_different_things() -> None:
    answers = {rank: _waiting("gradients of Net, bucket 0: float32[9]", 5, exchange="gradients") for rank in range(3)}
    answers[3] = _waiting("barrier()", 5, host="gpu-02", count=6)
    error = diagnosis.of_event(_world(), diagnosis.of_answers("", 5.0, answers, 7, range(4)))
    assert isinstance(error, CollectiveMismatch)
    assert error.where == "rank 3/4 on gpu-02, reported on every rank"
    assert error.evidence == (
        "ranks 0-2: gradients of Net, bucket 0: float32[9] at train.py:40 in main\n"
        "rank 3: barrier() at train.py:40 in main"
    )
    assert "run backward the same number of times" in str(error.do)


def test_a_difference_that_is_past_is_found() -> None:
    answers = {0: _waiting("a", 1, count=9), 1: _waiting("b", 1, count=9), 2: _waiting("b", 1, count=9)}
    for rank, answer in answers.items():
        answer["digests"] = {"7": 1, "8": 2 if rank else 3, "9": hash(answer["what"])}
    assert diagnosis.first_difference(answers) == 8
    assert diagnosis.first_difference({rank: answers[rank] for rank in (1, 2)}) is None


def test_the_line_of_where_names_the_rank_that_failed_and_the_one_that_tells() -> None:
    failed = Failed(2, "ValueError", "boom\n", "gpu-02")
    error = diagnosis.of_event(_world(), failed)
    assert isinstance(error, PeerFailed)
    assert error.rank == 2
    assert str(error).splitlines()[:3] == [
        "Rank 2 failed: ValueError.",
        "  on        [rank 2/4 on gpu-02], reported on [rank 0/4 on gpu-01]",
        "  evidence  boom",
    ]
    assert "rank 2" in str(error.do)
    without_host = diagnosis.of_event(_world(), replace(failed, hostname=""))
    assert without_host.where == "[rank 2/4], reported on [rank 0/4 on gpu-01]"
    ended = diagnosis.of_event(_world(), ProcessEnded(3, "barrier()", 17))
    assert (ended.what, ended.where) == (
        "barrier() cannot complete: rank 3 exited without reporting an error.",
        "reported on [rank 0/4 on gpu-01]",
    )


@pytest.mark.parametrize(
    ("gone", "left", "kind"),
    [
        ([1, 2], [1, 2], CollectiveMismatch),
        ([1, 2], [1], PeerMissing),
        ([1], [], PeerMissing),
        ([], [1], PeerMissing),
    ],
)
def test_a_broken_connection_is_a_mismatch_if_all_missing_ranks_have_left(
    gone: list[int], left: list[int], kind: type[Exception]
) -> None:
    departed = {rank: Left(rank) if rank in left else Failed(rank, "ValueError", "boom") for rank in (1, 2)}
    event = diagnosis.broken("barrier()", gone=gone, table="", departed=departed, reason="closed\nby peer")
    assert isinstance(diagnosis.of_event(_world(), event), kind)


def test_an_event_stays_small_however_many_ranks_there_are() -> None:
    answers = {
        rank: {
            **_waiting(f"number {rank}: " + "x" * 5000, 1.0, host=f"host{rank}", exchange=str(rank % 2)),
            "stack": [f"{rank}:{line} " + "y" * 5000 for line in range(16)],
        }
        for rank in range(2000)
    }
    assert len(json.dumps(asdict(diagnosis.of_answers("", 1.0, answers, 8, range(2000))))) < 200_000


def _differ(*words: str) -> CollectiveMismatch:
    places = [f"train.py:{30 + rank} in step" if rank else "train.py:3 in main" for rank in range(len(words))]
    return calls_differ(
        {
            rank: CollectiveCall(one, place, "gpu-01")
            for rank, (one, place) in enumerate(zip(words, places, strict=True))
        },
        16,
    )


def test_differences_are_reported() -> None:
    same = ["all_gather(float32[128, 50257])"] * 2
    shapes = _differ(*same, "all_gather(float32[96, 50257])")
    assert shapes.what == "all_gather was called with different shapes."
    assert shapes.where == "rank 2/16 on gpu-01, reported on every rank"
    assert shapes.evidence == (
        "rank 0: all_gather(float32[128, 50257]) at train.py:3 in main\n"
        "rank 1: all_gather(float32[128, 50257]) at train.py:31 in step\n"
        "rank 2: all_gather(float32[96, 50257]) at train.py:32 in step"
    )
    assert 'remainder="drop"' in str(shapes.do)
    dtypes = _differ('all_reduce("sum", int64[])', 'all_reduce("sum", float64[])')
    assert dtypes.what == "all_reduce was called with different dtypes."
    assert dtypes.where == "reported on every rank", "of two, neither is the odd one"
    assert _differ('all_reduce("sum", int64[])', 'all_reduce("max", int64[])').what == (
        "all_reduce was called with different arguments."
    )
    more = _differ("all_gather(int64[])", "all_gather(int64[], int64[])")
    assert more.what == "all_gather was called with different arguments."
    assert _differ("barrier()", "all_gather(int64[])").what == "Ranks called different collectives."
    gradients = "gradients of Net, bucket 0: float32[{}]"
    assert "same parameters frozen" in str(_differ(gradients.format(3), gradients.format(4)).do)


def test_long_words_are_cut_around_the_first_difference() -> None:
    kinds = ["float32[3]"] * 500
    other = [*kinds[:400], "float32[4]", *kinds[401:]]
    error = _differ(f"all_gather({', '.join(kinds)})", f"all_gather({', '.join(other)})")
    lines = str(error.evidence).splitlines()
    assert all(len(line) < collective_mismatch.LONGEST_WORDS + 60 for line in lines)
    assert "float32[4]" in lines[1]


def test_only_words_that_go_on_end_in_dots() -> None:
    fits = "x" * collective_mismatch.LONGEST_WORDS
    evidence = str(_differ(fits, "y" + fits).evidence).splitlines()
    assert evidence[0].startswith(f"rank 0: {fits} at ")
    assert evidence[1].startswith(f"rank 1: y{fits[1:]}... at ")


def test_a_notice_of_ranks_that_wait_for_different_collectives_says_what_to_do() -> None:
    gradients = "gradients of Net, bucket 0: float32[4]"
    answers = {0: _waiting(gradients, 30.1, exchange="gradients"), 1: _waiting("mean", 30.0, count=6)}
    said = diagnosis.notice(diagnosis.of_answers(gradients, 30.2, answers, 7, [0, 1]))
    assert said.startswith(f"{gradients} has been waiting for 30 s, for rank 1:\nrank ")
    assert "all ranks are waiting, for different collectives" in said
    assert "skip a step or stop with rankwise.mean(loss, len(x))" in said
    alone = {0: answers[0], 1: RUNNING}
    assert "different collectives" not in diagnosis.notice(diagnosis.of_answers(gradients, 30.2, alone, 7, [0, 1]))
