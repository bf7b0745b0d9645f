# SPDX-License-Identifier: Apache-2.0
"""Means over padded samples: a warning where the ranks' lengths differ and padding counts, and only there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from loss_steps import said
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world import World

    Sequences = list[torch.Tensor]
    Collate = Callable[[Sequences], tuple[torch.Tensor, torch.Tensor]]
    Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Of outputs [batch, seq, 3] and lengths [batch]."""

LENGTHS = (3, 5, 2, 7, 4, 4, 6, 2, 1, 3)


def _sequences(lengths: tuple[int, ...]) -> Sequences:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, 3, generator=generator, dtype=torch.float64) for length in lengths]


def _padded(samples: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    return pad_sequence(samples, batch_first=True), torch.tensor([len(one) for one in samples])


def _sequence_first(samples: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    return pad_sequence(samples), torch.tensor([len(one) for one in samples])


def _in_one_piece(samples: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat(samples), torch.tensor([len(one) for one in samples])


def _mask(outputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return (torch.arange(outputs.shape[1])[None] < lengths[:, None])[..., None].expand(outputs.shape)


def _mean(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def _mean_of_means(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean(dim=(1, 2)).mean()


def _without_padding(outputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    mask = _mask(outputs, lengths)
    return (outputs.square() * mask).sum() / mask.sum()


def _ratio_of_means(outputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    mask = _mask(outputs, lengths).double()
    return (outputs.square() * mask).mean() / mask.mean()


def _chosen(outputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return outputs.square()[_mask(outputs, lengths)].mean()


def _cross_entropy(outputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    targets = torch.where(_mask(outputs, lengths)[..., 0], 1, -100)
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _cross_entropy_of_rows(outputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    targets = torch.where(_mask(outputs, lengths)[..., 0], 1, -100)
    return nn.functional.cross_entropy(outputs.transpose(1, 2), targets)


def _sum_of_each(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.square().sum(dim=(1, 2)).mean()


def _train(_: World, strategy: str, loss: Loss, collate: Collate, lengths: tuple[int, ...]) -> int:
    model = nn.Sequential(nn.Linear(3, 3)).double()
    model = rw.shard(model) if strategy == "shard" else rw.replicate(model)
    with said() as lines:
        for x, num in rw.DataLoader(_sequences(lengths), global_batch_size=5, collate_fn=collate):
            loss(model(x), num).backward()
            model.zero_grad()
    return sum("elements of each sample on this rank, and over other numbers" in line for line in lines)


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
@pytest.mark.parametrize("loss", [_mean, _mean_of_means])
def test_a_mean_over_unequal_padding_is_warned_of_once(loss: Loss, strategy: str) -> None:
    results = testing.run_ranks(_train, 2, strategy, loss, _padded, LENGTHS)
    assert [result.get() for result in results] == [1, 0]


@pytest.mark.parametrize(
    ("loss", "collate", "lengths"),
    [
        (_without_padding, _padded, LENGTHS),
        (_ratio_of_means, _padded, LENGTHS),
        (_chosen, _padded, LENGTHS),
        (_cross_entropy_of_rows, _padded, LENGTHS),
        (_cross_entropy, _padded, LENGTHS),
        (_sum_of_each, _padded, LENGTHS),
        (_mean, _padded, (4,) * 10),
        (_mean, _in_one_piece, LENGTHS),
        # Shares of three and two samples: in batches [seq, batch] that looks like lengths that differ.
        (_mean, _sequence_first, (4,) * 10),
    ],
)
def test_what_does_not_count_padding_is_not_warned_of(loss: Loss, collate: Collate, lengths: tuple[int, ...]) -> None:
    assert [result.get() for result in testing.run_ranks(_train, 2, "replicate", loss, collate, lengths)] == [0, 0]


def _train_pipeline(_: World, loss: Loss) -> int:
    rw.mesh(pp=1, dp_replicate=2)
    model = nn.Sequential(nn.Linear(3, 3)).double()
    with said() as lines:
        step = rw.pipeline(model, loss, example=torch.ones(2, 4, 3, dtype=torch.float64), micro_batches=2)
        for x, num in rw.DataLoader(_sequences(LENGTHS), global_batch_size=5, collate_fn=_padded):
            step(x, num)
    return sum("is over other numbers of elements per sample in other copies" in line for line in lines)


@pytest.mark.parametrize(("loss", "num_lines"), [(_mean, [1, 0]), (_without_padding, [0, 0])])
def test_copies_of_a_pipeline_warn_of_unequal_padding_where_it_counts(loss: Loss, num_lines: list[int]) -> None:
    assert [result.get() for result in testing.run_ranks(_train_pipeline, 2, loss)] == num_lines
