# SPDX-License-Identifier: Apache-2.0
"""`replicate` and `no_sync`: microsteps add up to the gradient of the whole batch."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from on_ranks import one_rank
from replicas import TOLERANCE, Net, Parameters, batches, built, largest_difference, part
from said import check_said, listening
from torch import nn

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from on_ranks import RunRanks

    from rankwise.world.facts import World


def _accumulated_equals_whole(world: World, micro: int) -> Parameters:
    model = rw.replicate(built(Net))
    (x, y) = batches([17])[0]
    mine = [part(t, world.rank, world.world_size) for t in (x, y)]
    for index in range(micro):
        x_part, y_part = (part(t, index, micro) for t in mine)
        loss = lambda: nn.functional.mse_loss(model(x_part), y_part).backward()  # noqa: B023, E731
        if index < micro - 1:
            with rw.no_sync(model):
                loss()
        else:
            loss()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unequal_microsteps_give_the_gradient_of_the_whole_batch(run_ranks: RunRanks, world_size: int) -> None:
    whole = one_rank(_accumulated_equals_whole, 1)
    for result in run_ranks(_accumulated_equals_whole, world_size, 3):
        assert largest_difference(result.get(), whole) < TOLERANCE


def _helper_with_a_block_of_its_own(world: World) -> Parameters:
    """Three microsteps, the first of which is in a block within the block of the first two."""
    model = rw.replicate(built(Net))
    (x, y) = batches([17])[0]
    mine = [part(t, world.rank, world.world_size) for t in (x, y)]

    def microstep(index: int) -> None:
        x_part, y_part = (part(t, index, 3) for t in mine)
        nn.functional.mse_loss(model(x_part), y_part).backward()

    with rw.no_sync(model):
        with rw.no_sync(model):
            microstep(0)
        microstep(1)
    microstep(2)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_no_sync_inside_another_ends_with_the_outer_one(run_ranks: RunRanks, world_size: int) -> None:
    whole = one_rank(_accumulated_equals_whole, 1)
    for result in run_ranks(_helper_with_a_block_of_its_own, world_size):
        assert largest_difference(result.get(), whole) < TOLERANCE


def _weight_within_a_weight(world: World) -> float:
    model = rw.replicate(nn.Linear(1, 1, bias=False))
    x = torch.full((2, 1), 1.0 + world.rank)
    with rw.weight(model, [1, 3][world.rank]):
        with rw.weight(model, 5):
            pass  # of a helper
        model(x).mean().backward()
    assert model.weight.grad is not None
    return model.weight.grad.item()


def test_a_weight_counts_again_after_another_inside_it(run_ranks: RunRanks) -> None:
    for result in run_ranks(_weight_within_a_weight, 2):
        assert result.get() == (1 * 1.0 + 3 * 2.0) / 4


def _part_called_itself(world: World, micro: int) -> Parameters:
    """Backwards that do not pass through the model's own output: a gradient that arrives begins them."""
    layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 2)]).double()
    for number, parameter in enumerate(layers.parameters()):
        nn.init.constant_(parameter, 0.1 * number)
    model = rw.replicate(layers)
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        x = part(torch.randn(13, 3, generator=generator, dtype=torch.float64), world.rank, world.world_size)
        for index in range(micro):
            mine = part(x, index, micro)
            with rw.weight(model, len(mine)):
                loss = layers[step](mine).square().mean() if len(mine) else layers[step](mine).sum()
                if index < micro - 1:
                    with rw.no_sync(model):
                        loss.backward()
                else:
                    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_accumulation_is_exact_where_a_part_of_the_model_is_called(run_ranks: RunRanks, world_size: int) -> None:
    whole = one_rank(_part_called_itself, 1)
    for result in run_ranks(_part_called_itself, world_size, 3):
        assert largest_difference(result.get(), whole) < TOLERANCE


def _mixed_accumulation(world: World) -> Parameters:
    """A full backward, then an accumulated pair, without zero_grad in between."""
    model = rw.replicate(built(Net))
    for position, (x, y) in enumerate(batches([9, 4, 6])):
        mine = [part(t, world.rank, world.world_size) for t in (x, y)]
        if position == 1:
            with rw.no_sync(model):
                nn.functional.mse_loss(model(mine[0]), mine[1]).backward()
        else:
            nn.functional.mse_loss(model(mine[0]), mine[1]).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_gradients_from_before_an_accumulation_stay(run_ranks: RunRanks) -> None:
    model = built(Net)
    first, second, third = batches([9, 4, 6])
    nn.functional.mse_loss(model(first[0]), first[1]).backward()
    x, y = (torch.cat([a, b]) for a, b in zip(second, third, strict=True))
    nn.functional.mse_loss(model(x), y).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for world_size in (1, 2, 3):
        for result in run_ranks(_mixed_accumulation, world_size):
            assert largest_difference(result.get(), expected) < TOLERANCE


def _never_cleared(world: World, reduction: str) -> Parameters:
    """Batches of 7 samples and of 1, of which all ranks but one have none, onto gradients that are never cleared."""
    model = rw.replicate(built(Net))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for x, y in batches([7, 1, 7, 1]):
        mine = [part(t, world.rank, world.world_size) for t in (x, y)]
        nn.functional.mse_loss(model(mine[0]), mine[1], reduction=reduction).backward()
        optimizer.step()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_that_are_never_cleared_add_up_on_ranks_without_samples_too(
    run_ranks: RunRanks, world_size: int, reduction: str
) -> None:
    whole = one_rank(_never_cleared, reduction)
    for result in run_ranks(_never_cleared, world_size, reduction):
        assert largest_difference(result.get(), whole) < TOLERANCE


def _accumulate_oddly(world: World, how: str) -> Parameters:
    """Two microsteps of which something is odd, then what the odd thing leaves to be right."""
    model = rw.replicate(built(Net))
    first, second, third = batches([6, 6, 7])

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.mse_loss(model(x), y).backward()

    def mine(batch: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        return [part(t, world.rank, world.world_size) for t in batch]

    if how == "nothing at first":
        # The last rank has no samples in its first microstep.
        last = world.rank == world.world_size - 1
        whole = [torch.cat([a, b]) for a, b in zip(first, second, strict=True)]
        x, y = (part(t, world.rank, world.world_size) for t in whole)
        with rw.no_sync(model):
            backward(x[:0] if last else x[:1], y[:0] if last else y[:1])
        backward(x if last else x[1:], y if last else y[1:])
    else:
        with rw.no_sync(model):
            if how == "broken":
                hidden = model(mine(first)[0])
                model.first.weight.register_hook(_explode_once())
                with pytest.raises(FloatingPointError):
                    hidden.sum().backward()
            else:
                backward(*mine(first))
        model.zero_grad(set_to_none=how != "zeroed")
        backward(*mine(third))
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


class _explode_once:  # noqa: N801 - called like a function
    def __init__(self) -> None:
        self.done = False

    def __call__(self, _: torch.Tensor) -> None:
        if not self.done:
            self.done = True
            raise FloatingPointError("boom")


@pytest.mark.parametrize("how", ["nothing at first", "broken", "zeroed", "cleared"])
def test_an_accumulation_that_starts_oddly_or_is_given_up(run_ranks: RunRanks, how: str) -> None:
    model = built(Net)
    first, second, third = batches([6, 6, 7])
    x, y = [torch.cat([a, b]) for a, b in zip(first, second, strict=True)] if how == "nothing at first" else third
    nn.functional.mse_loss(model(x), y).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for world_size in (1, 2, 3):
        for result in run_ranks(_accumulate_oddly, world_size, how):
            got = {n: g for n, g in result.get().items() if n in expected}
            assert largest_difference(got, expected) < TOLERANCE


def _half_cleared(world: World) -> None:
    del world
    model = rw.replicate(built(Net))
    x, y = batches([6])[0]
    with rw.no_sync(model):
        nn.functional.mse_loss(model(x), y).backward()
    model.first.weight.grad = None
    nn.functional.mse_loss(model(x), y).backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_changed_in_the_middle_of_an_accumulation_are_an_error(world_size: int) -> None:
    for result in testing.run_ranks(_half_cleared, world_size):
        assert isinstance(result.error, ConfigurationError)
        assert "in the middle of an accumulation" in str(result.error)


def _own_gradients(world: World) -> None:
    del world
    model = rw.replicate(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))
    x = torch.ones(3, 4)
    model(x).mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    with rw.no_sync(model):
        own = torch.autograd.grad(model(x).mean(), list(model.parameters()))
    for mine, parameter, gradient in zip(own, model.parameters(), expected, strict=True):
        assert torch.allclose(mine, gradient), "not weighed"
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient), "not put aside"
    model.zero_grad()
    model[0].requires_grad_(requires_grad=False)
    with rw.no_sync(model):
        model(x).mean().backward()
    model(x).mean().backward()
    for parameter, gradient in zip(model[1].parameters(), expected[2:], strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient)


@pytest.mark.parametrize("world_size", [1, 2])
def test_own_gradients_begin_no_accumulation_nor_does_a_frozen_layer_break_one(
    run_ranks: RunRanks, world_size: int
) -> None:
    for result in run_ranks(_own_gradients, world_size):
        result.get()


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: object, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0].clone()

    @staticmethod
    def backward(_: object, *__: torch.Tensor) -> None:
        """Return nothing."""


def _undefined(world: World) -> None:
    del world
    model = rw.replicate(nn.Linear(4, 1))
    for _ in range(2):
        with rw.no_sync(model):
            (model(torch.ones(2, 4)).mean() + _NoGradient.apply(model.weight).sum()).backward()
    with rw.weight(model, 2):  # samples, as the microsteps count, whose losses cannot be read
        model(torch.ones(2, 4)).mean().backward()
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, torch.ones(1, 4))


def test_a_function_that_gives_no_gradient_breaks_no_accumulation(run_ranks: RunRanks) -> None:
    for result in run_ranks(_undefined, 2):
        result.get()


STEPS = (("counts", "nothing"), ("nothing",), ("nothing", "counts"), ("counts",), ("nothing",))
"""The microsteps of each step, and what they count on one rank."""


def _count_nothing(world: World, make: Callable[[], nn.Module], odd: int) -> list[Parameters]:
    """Train; return the parameters after each step. What counts nothing is padding, of which the loss is NaN."""
    model = rw.replicate(built(make), sync_batchnorm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after = []
    for number, step in enumerate(STEPS):
        # Gradients that are kept may lie in the memory that the ranks exchange: backward adds the NaN there.
        optimizer.zero_grad(set_to_none=number % 2 == 1)
        for index, ((x, y), counts) in enumerate(zip(batches([6] * len(step)), step, strict=True)):
            xs, ys = (part(t, world.rank, world.world_size) for t in (x, y))
            is_nothing = counts == "nothing" and world.rank == odd
            xs = xs * 0 if is_nothing else xs
            continues = rw.no_sync(model) if index < len(step) - 1 else nullcontext()
            with continues, rw.weight(model, 0 if is_nothing else len(xs)):
                loss = nn.functional.mse_loss(model(xs), ys)
                (loss * math.nan if is_nothing else loss).backward()
        optimizer.step()
        after.append({key: value.clone() for key, value in model.state_dict().items()})
    return after


def _without_what_counts_nothing(make: Callable[[], nn.Module], world_size: int, odd: int) -> list[Parameters]:
    model = built(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after = []
    for step in STEPS:
        optimizer.zero_grad()
        losses = []
        for (x, y), counts in zip(batches([6] * len(step)), step, strict=True):
            is_counted = torch.ones(6, dtype=torch.bool)
            if counts == "nothing":
                part(is_counted, odd, world_size).fill_(False)
            # BatchNorm's statistics are of all samples, those that count nothing too.
            outputs = model(x * is_counted[:, None])
            losses.append(nn.functional.mse_loss(outputs[is_counted], y[is_counted], reduction="none"))
        torch.cat(losses).mean().backward()
        optimizer.step()
        after.append({key: value.clone() for key, value in model.state_dict().items()})
    return after


@pytest.mark.parametrize("make", [Net, partial(Net, batchnorm=True)])
def test_samples_without_weight_change_only_batchnorms_statistics(
    run_ranks: RunRanks, make: Callable[[], nn.Module]
) -> None:
    for world_size, odd in ((2, 1), (3, 0)):
        expected = _without_what_counts_nothing(make, world_size, odd)
        for result in run_ranks(_count_nothing, world_size, make, odd):
            for step, (found, wanted) in enumerate(zip(result.get(), expected, strict=True)):
                assert largest_difference(found, wanted) < TOLERANCE, f"after step {step}"


def _count_nothing_before_batchnorm(world: World) -> list[str]:
    """Two steps in which all targets of rank 0 are to be ignored, then one in which no rank's count."""
    model = rw.replicate(built(lambda: Net(batchnorm=True)), sync_batchnorm=True)
    with listening() as said:
        for step, (x, _) in enumerate(batches([8, 8, 8])):
            xs = part(x, world.rank, world.world_size)
            ignored = world.rank == 0 or step == 2
            targets = torch.full((len(xs),), -100 if ignored else 1)
            nn.functional.cross_entropy(model(xs), targets).backward()
            model.zero_grad()
    return said


def test_samples_that_count_only_in_batchnorms_statistics_are_reported_once(run_ranks: RunRanks) -> None:
    first, second = (result.get() for result in run_ranks(_count_nothing_before_batchnorm, 2))
    check_said(first, ["the samples of this rank have no weight in the loss, but BatchNorm includes them"])
    assert second == []
