# SPDX-License-Identifier: Apache-2.0
"""Gradients in half precision through torch's group: their mean is that of float64, rounded once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from on_standin import build_standin, on_standin

import rankwise as rw
from rankwise.comm.backends.protocol import ChannelSize
from rankwise.comm.session import current
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import BucketChannel
    from rankwise.world.facts import World

CPU = torch.device("cpu")
# Of one element, of fewer than there are ranks, that no number of ranks divides, of several pieces.
SIZES = (1, 3, 1001, 2**18 + 7)
DTYPES = (torch.bfloat16, torch.float16)


def _gradient(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers that the dtype holds, and whose weighted sums float32 holds."""
    largest = 2 ** (8 if dtype == torch.bfloat16 else 11)
    generator = torch.Generator().manual_seed(1000 * rank + size)
    return torch.randint(1 - largest, largest, (size,), generator=generator).to(dtype)


def _expected(size: int, dtype: torch.dtype, shares: Sequence[float], weights: Sequence[float]) -> torch.Tensor:
    terms = [share * _gradient(rank, size, dtype).double() for rank, share in enumerate(shares) if share]
    return (torch.stack(terms).sum(0) / sum(weights)).to(dtype)


def _send(channel: BucketChannel, gradient: torch.Tensor, share: float, weight: float, absent: Sequence[int]) -> None:
    channel.claim()
    torch.mul(gradient, channel.factor(share), out=channel.body)
    channel.start(share, weight, absent)


def _means(world: World) -> None:
    group = current().exchange
    assert group is not None
    exchange = group.dup()
    cases = [(size, dtype) for dtype in DTYPES for size in SIZES]
    channels = exchange.channels([ChannelSize(size, 2, dtype, CPU) for size, dtype in cases])
    ranks = range(world.world_size)
    for shares, weights in (
        ([1.0] * world.world_size, [1.0] * world.world_size),
        ([rank + 1.0 for rank in ranks], [rank + 1.0 for rank in ranks]),
        ([1.0] * world.world_size, [1 / world.world_size] * world.world_size),
        # The last rank has no samples, and NaN where its gradients would be.
        ([*[3.0] * (world.world_size - 1), 0.0], [*[3.0] * (world.world_size - 1), 0.0]),
    ):
        share, weight = shares[world.rank], weights[world.rank]
        for (size, dtype), channel in zip(cases, channels, strict=True):
            gradient = _gradient(world.rank, size, dtype) if share else torch.full((size,), math.nan, dtype=dtype)
            _send(channel, gradient, share, weight, [1] if world.rank else [0, 1])
        for (size, dtype), channel in zip(cases, channels, strict=True):
            channel.finish()
            assert torch.equal(channel.result, _expected(size, dtype, shares, weights)), (size, dtype, shares)
            assert channel.total() == sum(weights)
            assert channel.is_flag_set(0)
            assert not channel.is_flag_set(1)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_mean_is_rounded_once(world_size: int) -> None:
    for result in run_ranks(_means, world_size, exchange="gloo"):
        result.get()


def _no_samples(_: World) -> None:
    exchange = current().exchange
    assert exchange is not None
    (channel,) = exchange.channels([ChannelSize(5, 0, torch.bfloat16, CPU)])
    _send(channel, torch.ones(5, dtype=torch.bfloat16), 0.0, 0.0, [])
    channel.finish()
    assert torch.equal(channel.result, torch.zeros(5, dtype=torch.bfloat16))


def test_the_mean_over_no_samples_is_zero() -> None:
    for result in run_ranks(_no_samples, 2, exchange="gloo"):
        result.get()


def _trained(world: World) -> None:
    torch.manual_seed(0)
    model = rw.replicate(torch.nn.Linear(37, 11).bfloat16().to(world.device))
    for num_samples in (world.rank + 1, world.world_size - world.rank, 2):
        model.zero_grad()
        x = (torch.randint(-3, 4, (num_samples, 37)).bfloat16() + world.rank).to(world.device)
        with rw.weight(model, num_samples):
            (model(x).sum() / num_samples).backward()
        (own,) = torch.autograd.grad(model(x).sum() / num_samples, model.weight)
        counts = rw.all_gather(float(num_samples))
        terms = [count * other.cpu().double() for count, other in zip(counts, rw.all_gather(own), strict=True)]
        expected = torch.stack(terms).sum(0) / sum(counts)
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad.cpu(), expected.bfloat16())


def test_a_model_in_bfloat16_receives_such_means() -> None:
    for result in run_ranks(_trained, 3, exchange="gloo"):
        result.get()


@pytest.mark.timeout(240)  # the device and its backend may have to be compiled
def test_a_model_in_bfloat16_on_a_device_receives_such_means() -> None:
    build_standin(strict=True)
    on_standin(_trained, 3, backend="strict")
