# SPDX-License-Identifier: Apache-2.0
"""Which batches of ranks are one step's, and which are not."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread, get_ident

import pytest

import rankwise as rw
from rankwise.comm.session import CurrentBatch, current, current_or_none
from rankwise.errors import CollectiveMismatch
from rankwise.replicate.loss.reports import batch_in_hand, check_same_batch


def _number(loader: int, epoch: int, batch: int) -> float:
    current().batches.current = CurrentBatch(loader, epoch, batch, 1, 2, 0, None, get_ident())
    # As it arrives: a mean over ranks, times their number.
    return batch_in_hand(current_or_none()) / 3 * 3


@pytest.mark.parametrize(
    "batches",
    [
        [(1, 0, 0), (1, 0, 0)],
        [(1, 4, 2**20 - 1), (1, 4, 2**20 - 1), (1, 4, 2**20 - 1)],
        [(2, 0, 3), (1, 0, 4)],
        [(1, 2, 3), None, (1, 2, 3)],
        [None, None],
        [(4095, 4095, 2**20 - 1)] * 2,
    ],
)
def test_batches_of_one_step(batches: list[tuple[int, int, int] | None]) -> None:
    with rw.join():
        check_same_batch([0.0 if one is None else _number(*one) for one in batches], "Net", are_all_ranks=True)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([(1, 0, 4), (1, 0, 5)], "rank 1 did not run backward for batch 4 of epoch 0"),
        ([(1, 1, 0), (1, 0, 5), (1, 1, 0)], "ranks 0, 2 did not run backward for batch 5 of epoch 0"),
        ([(7, 0, 4), None, (7, 0, 5)], "rank 2 did not run backward for batch 4 of epoch 0"),
    ],
)
def test_batches_of_different_steps(batches: list[tuple[int, int, int] | None], words: str) -> None:
    with rw.join():
        reported = [0.0 if one is None else _number(*one) for one in batches]
    with pytest.raises(CollectiveMismatch, match=words):
        check_same_batch(reported, "Net", are_all_ranks=True)


def test_ranks_along_an_axis_are_said_to_be_that() -> None:
    with rw.join():
        reported = [_number(1, 0, 4), _number(1, 0, 5)]
    with pytest.raises(CollectiveMismatch, match="rank 1 of the 2 along dp_replicate did not run backward"):
        check_same_batch(reported, "Net", are_all_ranks=False)


def test_a_batch_that_another_thread_took_is_not_in_hand() -> None:
    assert batch_in_hand(current_or_none()) == 0
    with rw.join():
        reader = Thread(target=_number, args=(1, 0, 0))
        reader.start()
        reader.join()
        # A number may be used again when its thread has ended.
        batch = current().batches.current
        assert batch is not None
        current().batches.current = replace(batch, thread=-1)
        assert batch_in_hand(current_or_none()) == 0
