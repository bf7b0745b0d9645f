# SPDX-License-Identifier: Apache-2.0
"""Buffers that are updated from a rank's own samples are named once; updated from all samples they are exact."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from loss_steps import whole
from replicas import TOLERANCE, largest_difference
from said import check_said, listening
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import spectral_norm

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas import Parameters

    from rankwise.world.facts import World

    Make = Callable[[], nn.Module]

NUM_CODES = 5


class Codebook(nn.Module):
    """Quantises vectors; its codes are moving averages of those that fell to them, as in VQ-VAE."""

    codes: torch.Tensor
    counts: torch.Tensor

    def __init__(self, *, of_all_ranks: bool = False, in_data: bool = False, num_columns: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(3, num_columns)
        self.register_buffer("codes", torch.randn(NUM_CODES, num_columns))
        self.register_buffer("counts", torch.ones(NUM_CODES))
        self.of_all_ranks = of_all_ranks
        self.in_data = in_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.layer(x)
        chosen = torch.cdist(z.detach(), self.codes).argmin(1)
        if self.training:
            self._move(z.detach(), nn.functional.one_hot(chosen, NUM_CODES).to(z.dtype))
        return z + (self.codes[chosen] - z).detach() + z.square()

    def _move(self, z: torch.Tensor, chosen: torch.Tensor) -> None:
        counts, sums = chosen.sum(0), chosen.T @ z
        if self.of_all_ranks:
            counts, sums = rw.all_reduce([counts, sums])
        own = [self.counts, self.codes]
        held, codes = [one.data for one in own] if self.in_data else own
        held.mul_(0.9).add_(counts, alpha=0.1)
        codes.lerp_(sums / counts.clamp(min=1)[:, None], 0.1)


class Mean(nn.Module):
    """Subtracts a running mean of its inputs."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = self.mean.lerp(x.mean(0), 0.1)
        return self.layer(x - self.mean)


class Cautious(Mean):
    """Leaves its mean alone where there are no samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if len(x) else self.layer(x)


class Counting(nn.Module):
    """Counts its calls, keeps something that is no number, and a table that grows with time."""

    calls: torch.Tensor
    nothing: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.full((4,), float("nan")))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("positions", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.nothing.add_(len(x))
        self.positions = torch.arange(3.0 + float(self.calls), dtype=x.dtype)
        return self.layer(x) + self.positions[0]


def _spectral() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(3, 4)), parametrizations.spectral_norm(nn.Linear(4, 2)))


def _with_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _mean_in_a_row() -> nn.Module:
    return nn.Sequential(Mean())


def _shared_codebook() -> nn.Module:
    return Codebook(of_all_ranks=True)


def _large_codebook() -> nn.Module:
    return Codebook(in_data=True, num_columns=10_000)


def _train(
    world: World, strategy: str, make: Make, num_samples: int = 23, on_rank_zero: bool = False
) -> tuple[list[str], Parameters]:
    torch.manual_seed(0)
    model = make().double()
    model = rw.shard(model) if strategy == "shard" else rw.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = rw.DataLoader(samples, global_batch_size=7)
    with listening() as said:
        for x in itertools.chain(loader, loader, loader):
            if on_rank_zero and world.rank == 0:
                with torch.no_grad():
                    model(samples[:2])
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return said, whole(dict(model.state_dict()))


@pytest.mark.parametrize(
    ("strategy", "make", "buffer"),
    [
        ("replicate", Codebook, "codes of Codebook"),
        ("replicate", _large_codebook, "codes of Codebook"),
        ("replicate", _mean_in_a_row, "0.mean of Sequential"),
        ("shard", Mean, "mean of Mean"),
    ],
    ids=["codebook", "large codebook", "running mean", "running mean, sharded"],
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_buffers_of_a_ranks_own_samples_are_named_once(strategy: str, make: Make, buffer: str, num_ranks: int) -> None:
    expected = f"buffer {buffer} differed between ranks after training forward 2,"
    for rank, result in enumerate(testing.run_ranks(_train, num_ranks, strategy, make)):
        said = [line for line in result.get()[0] if "buffer " in line]
        check_said(said, [] if rank else [expected])
        assert all("on rank 1; all ranks continue with rank 0's" in line for line in said)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_large_buffers_that_change_in_data_are_those_of_rank_zero(num_ranks: int) -> None:
    results = [one.get()[1] for one in testing.run_ranks(_train, num_ranks, "replicate", _large_codebook)]
    # The last forward pass has changed each rank's own, by a tenth of its last batch.
    apart = [(one["codes"] - results[0]["codes"]).abs().max() for one in results]
    assert max(apart) < 0.5


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_buffer_of_all_ranks_samples_is_exact(num_ranks: int) -> None:
    (alone,) = testing.run_ranks(_train, 1, "replicate", _shared_codebook)
    for result in testing.run_ranks(_train, num_ranks, "replicate", _shared_codebook):
        said, state = result.get()
        assert [line for line in said if "buffer " in line] == []
        assert largest_difference(state, alone.get()[1]) < TOLERANCE


@pytest.mark.parametrize(
    ("make", "num_samples", "on_rank_zero"),
    [
        (_spectral, 23, False),
        (_with_batchnorm, 21, False),
        (Counting, 23, False),
        # One sample, of rank 0: the others leave out the update, or make it of nothing.
        (Cautious, 1, False),
        (Mean, 1, False),
        (_shared_codebook, 1, False),
        # Called without gradients on rank 0 only, as for a picture.
        (Counting, 23, True),
    ],
    ids=["spectral_norm", "BatchNorm", "counter", "no update", "of nothing", "all ranks, one sample", "on rank 0"],
)
def test_no_report_for(make: Make, num_samples: int, on_rank_zero: bool) -> None:
    for result in testing.run_ranks(_train, 3, "replicate", make, num_samples, on_rank_zero):
        assert [line for line in result.get()[0] if "buffer " in line] == []
