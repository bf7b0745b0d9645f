# SPDX-License-Identifier: Apache-2.0
"""An error on an empty or short batch says how many samples the rank was given; any other error says nothing of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.errors import PeerFailed
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from rankwise.testing import RankResult
    from rankwise.world.facts import World

WORDS = "the last batch that this rank got from its DataLoader held"


def _norms(world: World, length: int, size: int) -> None:
    model = nn.BatchNorm1d(3)
    for batch in rw.DataLoader(torch.ones(length, 3), global_batch_size=size):
        model(batch)
        rw.barrier()


def _takes_maximum(world: World, length: int, size: int) -> None:
    for batch in rw.DataLoader(torch.ones(length), global_batch_size=size):
        batch.max()
        rw.barrier()


def _fails_afterwards(world: World, length: int, size: int) -> None:
    for _ in rw.DataLoader(torch.ones(length), global_batch_size=size):
        rw.barrier()
    message = "after the epoch"
    raise ValueError(message)


def _fails_at_once(world: World, length: int, size: int) -> None:
    for _ in rw.DataLoader(torch.ones(length), global_batch_size=size // 2):
        message = "in a whole batch, of one sample on each rank"
        raise ValueError(message)


def _notes(result: RankResult) -> list[str]:
    # run_ranks adds the traceback as a note, of which these are a part too.
    return [note for note in getattr(result.error, "__notes__", ()) if note.startswith("rankwise: ")]


@pytest.mark.parametrize(
    ("fn", "data", "ranks", "words"),
    [
        (_norms, (2, 11, 4), {1}, ["held 1 sample.", "has 3 of 4 samples", 'remainder="drop"']),
        (_norms, (1, 9, 4), {0}, ["held 1 sample.", "has 1 of 4 samples"]),
        (_takes_maximum, (3, 9, 4), {1, 2}, ["held 0 samples.", "has 1 of 4 samples"]),
    ],
)
def test_an_error_says_how_many_samples_the_rank_was_given(
    fn: Any, data: tuple[int, int, int], ranks: set[int], words: list[str]
) -> None:
    """``data``: ranks, samples, samples of a global batch."""
    results = run_ranks(fn, *data)
    said = {}
    for rank, result in enumerate(results):
        if isinstance(result.error, PeerFailed):
            assert _notes(result) == []
        else:
            said[rank] = _notes(result)
    assert said
    assert said.keys() <= ranks
    for notes in said.values():
        (note,) = notes
        assert WORDS in note
        assert [word for word in words if word not in note] == []


@pytest.mark.parametrize("fn", [_fails_afterwards, _fails_at_once])
def test_an_error_that_is_not_about_a_short_batch_says_nothing_of_it(fn: Any) -> None:
    results = run_ranks(fn, 2, 9, 4)
    assert any(isinstance(result.error, ValueError) for result in results)
    assert all(_notes(result) == [] for result in results)


def _reshapes_to_a_constant(world: World, length: int, size: int) -> None:
    for batch in rw.DataLoader(torch.ones(length, 3), global_batch_size=size):
        batch.reshape(size, -1)


def test_an_error_that_names_the_global_batch_says_what_this_ranks_share_is() -> None:
    results = run_ranks(_reshapes_to_a_constant, 3, 15, 5)
    failed = [result for result in results if isinstance(result.error, RuntimeError)]
    notes = [note for result in failed for note in _notes(result)]
    assert notes
    assert all(re.search(r"this rank got [12] of the 5 samples of the global batch.* as in len\(x\)", n) for n in notes)


def _batch_size(world: World) -> tuple[int, int]:
    loader = rw.DataLoader(torch.ones(20), global_batch_size=5)
    return loader.batch_size, len(next(iter(loader)))


def test_batch_size_is_this_ranks_share() -> None:
    assert [result.get() for result in run_ranks(_batch_size, 3)] == [(2, 2), (2, 2), (1, 1)]
