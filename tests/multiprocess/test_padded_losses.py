# SPDX-License-Identifier: Apache-2.0
"""Means over padded samples: an error where the ranks' lengths differ and padding counts, and only there."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import torch
from loss_steps import said, whole
from replicas import TOLERANCE, largest_difference
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replicas import Parameters

    from rankwise.world.facts import World

    Sequences = list[torch.Tensor]
    Collate = Callable[[Sequences], tuple[torch.Tensor, torch.Tensor]]
    Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Of outputs [batch, seq, 3] and lengths [batch]."""
    Losses = Sequence[Loss]
    Weigh = Callable[[torch.Tensor], int]

LENGTHS = (3, 5, 2, 7, 4, 4, 6, 2, 1, 3)
BOUNDS = {2: ((0, 3), (3, 5)), 3: ((0, 2), (2, 4), (4, 5))}
"""Which samples of a batch of five each rank has, by the number of ranks."""


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


def _sum_over_all_elements(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.square().sum() / outputs.numel()


def _sum_over_sizes(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.square().sum() / outputs.shape[0] / outputs.shape[1]


def _sum_of_means(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean(dim=(1, 2)).sum()


def _two_terms(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.sum(dim=(1, 2)).square().mean() + 0.1 * outputs.square().mean()


def _masked(outputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
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


def _masked_in_python(outputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    mask = _mask(outputs, lengths)
    return (outputs.square() * mask).mean() * (mask.numel() / int(mask.sum()))


def _sum_of_each_channel(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.square().transpose(1, 2).sum(2).mean()


def _sum(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return 0.01 * outputs.square().sum()


def _sum_over_samples(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.square().sum() / len(outputs)


def _train(
    _: World, strategy: str, losses: Losses, collate: Collate, lengths: tuple[int, ...], weigh: Weigh | None = None
) -> list[Parameters]:
    return [_trained(strategy, loss, collate, lengths, weigh) for loss in losses]


def _trained(strategy: str, loss: Loss, collate: Collate, lengths: tuple[int, ...], weigh: Weigh | None) -> Parameters:
    model = _model()
    model = rw.shard(model) if strategy == "shard" else rw.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, num in rw.DataLoader(_sequences(lengths), global_batch_size=5, collate_fn=collate):
        optimizer.zero_grad()
        with nullcontext() if weigh is None else rw.weight(model, weigh(x)):
            loss(model(x), num).backward()
        optimizer.step()
    return whole(model.state_dict())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3, bias=False)).double()


UNEQUAL: Losses = [_mean, _mean_of_means, _sum_over_all_elements, _sum_over_sizes, _sum_of_means, _two_terms]


@pytest.mark.parametrize(
    ("strategy", "loss"), [*(("replicate", one) for one in UNEQUAL), ("shard", _mean), ("shard", _two_terms)]
)
def test_a_mean_over_unequal_padding_is_an_error_on_all_ranks(strategy: str, loss: Loss) -> None:
    _expect_error(strategy, loss, lengths=2 * LENGTHS, num_ranks=2, evidence="on this rank; ")


def test_a_rank_without_samples_raises_it_too() -> None:
    _expect_error("replicate", _mean, lengths=(3, 5), num_ranks=3, evidence="this rank has no samples; ")


def _expect_error(strategy: str, loss: Loss, *, lengths: tuple[int, ...], num_ranks: int, evidence: str) -> None:
    errors = [one.error for one in testing.run_ranks(_train, num_ranks, strategy, [loss], _padded, lengths)]
    assert [type(error) for error in errors] == [ConfigurationError] * num_ranks
    assert all(
        "averages over different numbers of elements per sample on different ranks" in str(error) for error in errors
    )
    assert all("test_padded_losses.py:" in str(error) for error in errors)
    assert evidence in str(errors[-1])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("weigh", [len, torch.numel])
def test_a_given_weight_says_what_counts(weigh: Weigh, num_ranks: int) -> None:
    lengths = (3, 5, 2, 7, 4)
    model = _model()
    parts = [_sequences(lengths)[start:end] for start, end in BOUNDS[num_ranks]]
    padded = [_padded(one)[0] for one in parts]
    weights = [weigh(x) for x in padded]
    loss = sum((w * model(x).square().mean() for x, w in zip(padded, weights, strict=True)), torch.zeros(()))
    (loss / sum(weights)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for result in testing.run_ranks(_train, num_ranks, "replicate", [_mean], _padded, lengths, weigh):
        assert largest_difference(result.get()[0], dict(model.state_dict())) < TOLERANCE


EXACT: list[tuple[Losses, Collate, tuple[int, ...]]] = [
    ([_masked, _masked_in_python, _ratio_of_means, _chosen, _cross_entropy_of_rows, _cross_entropy], _padded, LENGTHS),
    ([_sum_of_each, _sum_of_each_channel, _sum_over_samples, _sum], _padded, LENGTHS),
    (UNEQUAL, _padded, (4,) * 10),
    ([_mean], _in_one_piece, LENGTHS),
    # Shares of three and two samples: in batches [seq, batch] that looks like lengths that differ.
    ([_mean], _sequence_first, (4,) * 10),
]


@pytest.mark.parametrize(("strategy", "num_ranks"), [("replicate", 2), ("replicate", 3), ("shard", 2)])
@pytest.mark.parametrize(("losses", "collate", "lengths"), EXACT)
def test_a_loss_that_does_not_count_padding_is_exact(
    losses: Losses, collate: Collate, lengths: tuple[int, ...], strategy: str, num_ranks: int
) -> None:
    (alone,) = testing.run_ranks(_train, 1, strategy, losses, collate, lengths)
    for result in testing.run_ranks(_train, num_ranks, strategy, losses, collate, lengths):
        apart = [largest_difference(got, one) for got, one in zip(result.get(), alone.get(), strict=True)]
        assert max(apart) < TOLERANCE, apart


def _train_pipeline(_: World, loss: Loss) -> int:
    rw.mesh(pp=1, dp_replicate=2)
    model = nn.Sequential(nn.Linear(3, 3)).double()
    with said() as lines:
        step = rw.pipeline(model, loss, example=torch.ones(2, 4, 3, dtype=torch.float64), micro_batches=2)
        for x, num in rw.DataLoader(_sequences(LENGTHS), global_batch_size=5, collate_fn=_padded):
            step(x, num)
    return sum("averages over different numbers of elements per sample in different copies" in line for line in lines)


@pytest.mark.parametrize(("loss", "num_lines"), [(_mean, [1, 0]), (_masked, [0, 0])])
def test_copies_of_a_pipeline_warn_of_unequal_padding_where_it_counts(loss: Loss, num_lines: list[int]) -> None:
    assert [result.get() for result in testing.run_ranks(_train_pipeline, 2, loss)] == num_lines
