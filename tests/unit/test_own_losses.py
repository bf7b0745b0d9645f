# SPDX-License-Identifier: Apache-2.0
"""Which lines of ranks are taken for losses of their own."""

from __future__ import annotations

import pytest

from rankwise.launch.agent.own_losses import WATCHED_BYTES, OwnLosses


def _notices(*lines: bytes) -> list[str]:
    """Return what is said about the lines of rank 0, rank 1 and so on, one each."""
    losses = OwnLosses()
    return [losses.notice(0, rank, [line]) for rank, line in enumerate(lines)]


def test_the_same_line_with_other_losses_is_named_once() -> None:
    first, second, third = _notices(b"step 3 Loss: 0.25", b"step 3 Loss: 1e3 0.5", b"step 3 Loss: 0.75")
    assert first == second == ""
    assert third.startswith(
        "ranks print different losses: 'step 3 Loss: 0.25' on rank 0, 'step 3 Loss: 0.75' on rank 2; each is"
    )
    losses = OwnLosses()
    found = [losses.notice(0, rank, [f"loss {epoch}.{rank}".encode()]) for epoch in range(3) for rank in range(2)]
    assert [bool(text) for text in found] == [False, True, False, False, False, False]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"loss 0.25", b"loss 0.25"),
        (b"took 0.25 s", b"took 0.75 s"),
        (b"epoch 0: loss 0.25", b"epoch 1: loss 0.75"),
        (b"rank 0: loss 0.25", b"rank 1: loss 0.75"),
        (b"loss 0.25, 1.25 s", b"loss 0.25, 1.5 s"),
        (b"lossless 0.25", b"lossless 0.75"),
    ],
    ids=["the same", "no loss", "another epoch", "lines that name their rank", "another time", "another word"],
)
def test_other_lines_are_not(one: bytes, other: bytes) -> None:
    assert _notices(one, other) == ["", ""]


def test_a_restarted_job_is_not_compared_with_what_it_was() -> None:
    losses = OwnLosses()
    assert [losses.notice(attempt, attempt, [b"loss 0.%d" % attempt]) for attempt in range(2)] == ["", ""]


def test_one_rank_may_print_several_losses() -> None:
    losses = OwnLosses()
    assert [losses.notice(0, rank, [b"loss 0.25", b"loss 0.125"]) for rank in range(2)] == ["", ""]


def test_only_the_beginning_of_the_output_is_compared() -> None:
    losses = OwnLosses()
    assert losses.notice(0, 0, [b"." * WATCHED_BYTES, b"loss 0.25"]) == ""
    assert losses.notice(0, 1, [b"loss 0.75"]) == ""
