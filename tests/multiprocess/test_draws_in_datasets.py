# SPDX-License-Identifier: Apache-2.0
"""Random numbers in a dataset: silent where they are seeded by sample, named where a rank's part seeds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from said import listening
from torch.utils.data import Dataset, IterableDataset

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.world.facts import World

BATCH = 8
RANKS = 2


def _draw() -> torch.Tensor:
    """Draw as many rows, and as many single numbers, as a rank has samples."""
    rows = torch.randn(BATCH // RANKS, 3).sum(0)
    return rows + sum(torch.rand(()) for _ in range(BATCH // RANKS))


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 3 * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return _draw() + index


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (_draw() + index for index in range(3 * BATCH))


class AtOnce(Samples):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [_draw() + index for index in indices]


def _with_noise(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.randn(1)


class Constant(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


def _read(_: World, kind: str) -> tuple[list[list[float]], list[str]]:
    model = rw.replicate(torch.nn.Linear(3, 1))
    dataset = {"samples": Samples, "stream": Stream, "at once": AtOnce, "collate": Constant}[kind]()
    collate = _with_noise if kind == "collate" else torch.stack
    with listening() as said:
        rows: list[list[float]] = []
        for batch in rw.DataLoader(dataset, global_batch_size=BATCH, collate_fn=collate):
            model(batch).mean().backward()
            rows += batch.tolist()
    return rows, [one for one in said if "random numbers" in one or "draws" in one]


@pytest.mark.parametrize("kind", ["samples", "stream"])
def test_draws_that_are_seeded_by_sample_are_exact_and_silent(kind: str) -> None:
    (alone,) = testing.run_ranks(_read, 1, kind)
    results = [one.get() for one in testing.run_ranks(_read, RANKS, kind)]
    assert sorted(row for rows, _ in results for row in rows) == sorted(alone.get()[0])
    assert [said for _, said in results] == [[]] * RANKS


@pytest.mark.parametrize(("kind", "num_lines"), [("at once", 2), ("collate", 1)])
def test_draws_for_a_part_of_a_batch_are_named_once_with_their_line(kind: str, num_lines: int) -> None:
    said = testing.run_ranks(_read, RANKS, kind)[0].get()[1]
    assert len(set(said)) == len(said) == num_lines
    for text in said:
        assert "test_draws_in_datasets.py:" in text
        assert "draws random numbers for the samples that this rank has of a batch" in text
