# SPDX-License-Identifier: Apache-2.0
"""Compressed gradients: equal on all ranks, nothing lost over time, failures that pass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.compress.low_rank import FactorPlan, basis_of, orthonormaliser
from rankwise.errors import ConfigurationError
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from on_ranks import RunRanks

    from rankwise.compress.methods import Method
    from rankwise.world.facts import World

pytestmark = pytest.mark.every_exchange

REMEMBERING = ["int8", rw.PowerSGD(rank=2), rw.TopK(share=0.1)]
METHODS = ["bf16", "fp16", *REMEMBERING]
SHAPES = [(17, 9), (5,), (3, 4, 5), (), (600,)]


class Linear(nn.Module):
    """A loss that is linear in its parameters: their gradients are what is passed in."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES])

    def forward(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        pairs = zip(self.parts, gradients, strict=True)
        products = [(part * own).sum() for part, own in pairs if own is not None]
        return torch.stack(products).sum()


def _gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def _step(model: Linear, gradients: list[torch.Tensor], num_samples: int) -> None:
    with rw.weight(model, num_samples):
        model(gradients).backward()
    with torch.no_grad():
        for part in model.parts:
            assert (part.grad is not None) == part.requires_grad
            if part.grad is not None:
                part.add_(part.grad)
            part.grad = None


def _drain(world: World, method: Method | str) -> None:
    """Random steps with unequal weights, then steps that give nothing but what is remembered."""
    linear = Linear()
    linear.parts[3].requires_grad_(requires_grad=False)
    model = rw.replicate(linear, compress=method)
    total = sum(range(1, world.world_size + 1))
    expected = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(4):
        if step == 2:
            # The buckets are laid out anew, and go on with what was left out before.
            model.parts[3].requires_grad_(requires_grad=True)
        _step(model, _gradients(10 * step + world.rank), num_samples=world.rank + 1)
        for rank in range(world.world_size):
            for part, mean, gradient in zip(model.parts, expected, _gradients(10 * step + rank), strict=True):
                if part.requires_grad:
                    mean.add_(gradient, alpha=(rank + 1) / total)
    nothing = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    far = max(float((part - mean).abs().max()) for part, mean in zip(model.parts, expected, strict=True))
    for _ in range(30):
        _step(model, nothing, num_samples=world.rank + 1)
    near = max(float((part - mean).abs().max()) for part, mean in zip(model.parts, expected, strict=True))
    assert far > 1e-4, "it is compressed"
    assert near < 1e-9, "nothing is lost"
    for part in model.parts:
        assert all(torch.equal(other, part) for other in rw.all_gather(part))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("method", REMEMBERING, ids=str)
def test_a_remainder_is_added_to_a_later_step(run_ranks: RunRanks, world_size: int, method: Method | str) -> None:
    for result in run_ranks(_drain, world_size, method):
        result.get()


def _round(world: World, method: str, epsilon: float) -> None:
    model = rw.replicate(Linear(), compress=method)
    model(_gradients(world.rank)).backward()
    everyone = [_gradients(rank) for rank in range(world.world_size)]
    for number, part in enumerate(model.parts):
        assert part.grad is not None
        mean = torch.stack([gradients[number] for gradients in everyone]).mean(0)
        sizes = torch.stack([gradients[number] for gradients in everyone]).abs().amax(0)
        assert bool(((part.grad - mean).abs() <= epsilon * sizes * world.world_size + 1e-7).all())
        assert not torch.equal(part.grad, mean)
        assert all(torch.equal(other, part.grad) for other in rw.all_gather(part.grad))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("method", "epsilon"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_two_bytes_round_and_nothing_else(run_ranks: RunRanks, world_size: int, method: str, epsilon: float) -> None:
    for result in run_ranks(_round, world_size, method, epsilon):
        result.get()


def _steps_of_many_tokens(world: World, first: int, size: float, *, accumulates: bool) -> list[torch.Tensor]:
    """Return the gradients of steps ``first`` to 2, of batches that are thousands of tokens."""
    model = rw.replicate(Linear(), compress="fp16")
    found: list[torch.Tensor] = []
    for step in range(first, 3):
        gradients = [size * gradient for gradient in _gradients(10 * step + world.rank)]
        if accumulates:
            with rw.weight(model, 3000), rw.no_sync(model):
                model(gradients).backward()
        with rw.weight(model, 3000 if world.rank == step % 2 else 5000):
            model(gradients).backward()
        found += [part.grad.clone() for part in model.parts if part.grad is not None]
        model.zero_grad()
    return found


def _first_step(world: World) -> None:
    for size, accumulates in ((200.0, False), (200.0, True), (1e-6, False)):
        undisturbed = _steps_of_many_tokens(world, 0, size, accumulates=accumulates)
        assert all(bool(gradient.isfinite().all()) and bool(gradient.any()) for gradient in undisturbed)
        after_resume = _steps_of_many_tokens(world, 2, size, accumulates=accumulates)
        for gradient, same in zip(after_resume, undisturbed[2 * len(SHAPES) :], strict=True):
            assert torch.equal(gradient, same)


def test_float16_has_room_in_the_first_step_as_in_any_other(run_ranks: RunRanks) -> None:
    for result in run_ranks(_first_step, 2):
        result.get()


def _overflow(world: World, method: Method | str) -> None:
    model = rw.replicate(Linear(), compress=method)
    for step in range(4):
        gradients = _gradients(10 * step + world.rank)
        if step == 1 and world.rank == 1:
            gradients[0][3, 2] = math.inf
            gradients[4][7] = math.nan
        model.zero_grad()
        model(gradients).backward()
        found = torch.cat([part.grad.flatten() for part in model.parts if part.grad is not None])
        assert bool(found.isfinite().all()) == (step != 1), "said on every rank, in this step only"


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_an_overflow_is_seen_on_every_rank_and_is_not_remembered(run_ranks: RunRanks, method: Method | str) -> None:
    for result in run_ranks(_overflow, 2, method):
        result.get()


def _partly_used(world: World, method: Method | str) -> None:
    layers = nn.ModuleList([nn.Linear(20, 20) for _ in range(3)]).double()
    model = rw.replicate(layers, compress=method)
    x = torch.ones(2 * world.rank, 20, dtype=torch.float64)
    for _ in range(2):
        with rw.weight(model, len(x)), rw.no_sync(model):
            layers[0](x).sum().backward()
        with rw.weight(model, len(x)):
            (layers[1] if world.rank == 1 else layers[0])(x).sum().backward()
        assert layers[2].weight.grad is None
        assert layers[1].weight.grad is not None
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(bool(grad.isfinite().all()) for grad in grads)
        for grad in grads:
            assert all(torch.equal(other, grad) for other in rw.all_gather(grad))
        model.zero_grad()


def _unused_by_all(world: World, method: Method | str) -> None:
    """One step in which no rank uses two of the parts: what they have left comes once they are used again."""
    model = rw.replicate(Linear(), compress=method)
    expected = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(3):
        of_ranks = [_gradients(10 * step + rank) for rank in range(world.world_size)]
        unused = {0, 4} if step == 1 else set[int]()
        with rw.weight(model, 1 + world.rank):
            model([None if n in unused else own for n, own in enumerate(of_ranks[world.rank])]).backward()
        for number, (part, mean) in enumerate(zip(model.parts, expected, strict=True)):
            assert (part.grad is None) == (number in unused)
            if part.grad is not None:
                part.data.add_(part.grad)
                for rank, gradients in enumerate(of_ranks):
                    mean.add_(gradients[number], alpha=(1 + rank) / sum(range(1, world.world_size + 1)))
        model.zero_grad()
    for _ in range(30):
        _step(model, [torch.zeros_like(part) for part in model.parts], num_samples=1 + world.rank)
    assert max(float((part - mean).abs().max()) for part, mean in zip(model.parts, expected, strict=True)) < 1e-9


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("method", REMEMBERING, ids=str)
def test_a_remainder_of_an_unused_parameter_is_kept_until_it_is_used(
    run_ranks: RunRanks, world_size: int, method: Method | str
) -> None:
    for result in run_ranks(_unused_by_all, world_size, method):
        result.get()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_unused_parameters_empty_ranks_and_accumulation(run_ranks: RunRanks, method: Method | str) -> None:
    for result in run_ranks(_partly_used, 3, method):
        result.get()


def _wrong(world: World) -> None:
    with pytest.raises(ConfigurationError, match=r"'int8'.*rankwise\.PowerSGD\(rank=\.\.\.\)"):
        rw.replicate(nn.Linear(2, 2), compress="zip")
    for rank in (0, 2.5, "4", True):
        with pytest.raises(ConfigurationError, match=f"at least 1, got {rank!r}"):
            rw.PowerSGD(rank=rank)  # type: ignore[arg-type]
    for share in (1.5, 0, "1", True):
        with pytest.raises(ConfigurationError, match="above 0"):
            rw.TopK(share=share)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"(?s)compress differs.*rank 0: \"PowerSGD.*rank 1: \"Int8"):
        rw.replicate(nn.Linear(2, 2), compress="int8" if world.rank else "powersgd")


def test_bad_and_different_ways_are_refused(run_ranks: RunRanks) -> None:
    for result in run_ranks(_wrong, 2):
        result.get()


def test_only_matrices_that_gain_by_it_are_factored() -> None:
    plan = FactorPlan([torch.Size([100, 50]), torch.Size([7]), torch.Size([3, 3]), torch.Size([8, 2, 3, 3])], rank=2)
    assert plan.matrices == [(0, 100, 50, 2), (5016, 8, 18, 2)]
    assert plan.rest == [slice(5000, 5007), slice(5007, 5016)]
    assert (plan.num_first, plan.num_second) == (200 + 7 + 9 + 16, 100 + 36)


def test_bases_are_orthonormal_and_without_what_is_no_direction_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    p = 1e-30 * torch.randn(50, 4, generator=generator)
    p[:, 1] = 2 * p[:, 0]
    p[:, 2] = 0
    p[:, 3] *= 1e30
    basis = basis_of(p, orthonormaliser(p.double()))
    ones = torch.tensor([1.0, 0.0, 0.0, 1.0])
    torch.testing.assert_close(basis.T @ basis, ones.diag(), atol=1e-6, rtol=0)
    p[7, 3] = math.inf
    assert bool(basis_of(p, orthonormaliser(p.double())).isnan().all())
    assert not bool(basis_of(p, orthonormaliser(torch.zeros(50, 4, dtype=torch.float64))).nan_to_num().any())


class Odd(nn.Module):
    """Parameters of kinds that few models have."""

    def __init__(self) -> None:
        super().__init__()
        self.complex = nn.Parameter(torch.ones(30, 30, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.complex * factor).sum().imag + self.empty.sum()


def _odd(world: World, method: Method | str) -> None:
    model = rw.replicate(Odd(), compress=method)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1,), world.rank + 1j)).backward()
        assert model.complex.grad is not None
        assert torch.equal(model.complex.grad, torch.full_like(model.complex, 1 + (world.world_size - 1) / 2 * 1j))
        assert model.empty.grad is not None


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_complex_numbers_travel_as_they_are_and_nothing_does_too(run_ranks: RunRanks, method: Method | str) -> None:
    for result in run_ranks(_odd, 2, method):
        result.get()


def _in_autocast(world: World) -> None:
    model = rw.replicate(nn.Linear(64, 64, bias=False), compress=rw.PowerSGD(rank=2))
    given, got = torch.zeros(64, 64), torch.zeros(64, 64)
    for step in range(60):
        everyone = [torch.randn(64, 64, generator=torch.Generator().manual_seed(9 * step + r)) for r in range(2)]
        if step > 3:
            everyone = [torch.zeros(64, 64)] * 2
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), rw.weight(model, 1):
            (model.weight * everyone[world.rank]).sum().backward()
        assert model.weight.grad is not None
        given += torch.stack(everyone).mean(0)
        got += model.weight.grad
    assert float((given - got).abs().max()) < 1e-4


def test_autocast_around_backward_loses_nothing(run_ranks: RunRanks) -> None:
    for result in run_ranks(_in_autocast, 2):
        result.get()


def _large_in_float16(world: World) -> None:
    model = rw.replicate(nn.Linear(64, 64, bias=False).half(), compress="powersgd")
    for step in range(4):
        generator = torch.Generator().manual_seed(9 * step + world.rank)
        model.zero_grad()
        with rw.weight(model, 1):
            (model.weight * (64 * torch.randn(64, 64, generator=generator)).half()).sum().backward()
        assert model.weight.grad is not None
        assert bool(model.weight.grad.isfinite().all())


def test_factors_do_not_grow_with_the_square_of_the_gradients(run_ranks: RunRanks) -> None:
    for result in run_ranks(_large_in_float16, 2):
        result.get()


class _Break(torch.autograd.Function):
    @staticmethod
    def forward(_: object, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0].clone()

    @staticmethod
    def backward(_: object, *__: torch.Tensor) -> torch.Tensor:
        raise FloatingPointError


def _unfrozen_together_and_broken(_: World, method: Method | str) -> None:
    one = nn.Sequential(*[nn.Linear(600, 600) for _ in range(3)])
    one[0].requires_grad_(requires_grad=False)
    other = nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last)
    rw.replicate(one, compress=method)
    rw.replicate(other, compress=method)
    for step in range(6):
        if step == 3:
            one[0].requires_grad_(requires_grad=True)
        one.zero_grad()
        other.zero_grad()
        images = torch.randn(2, 16, 8, 8)
        if step in {1, 4}:
            with pytest.raises(FloatingPointError), rw.weight(one, 2):
                one[1:](_Break.apply(one[0](torch.randn(2, 600).requires_grad_()))).square().mean().backward()
        else:
            (one(torch.randn(2, 600)).square().mean() + other(images).square().mean()).backward()
            for parameter in (*one.parameters(), *other.parameters()):
                assert (parameter.grad is None) == (step < 3 and parameter in set(one[0].parameters()))
                if parameter.grad is not None:
                    assert all(torch.equal(grad, parameter.grad) for grad in rw.all_gather(parameter.grad))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_two_models_layers_unfrozen_and_broken_steps(run_ranks: RunRanks, method: Method | str) -> None:
    for result in run_ranks(_unfrozen_together_and_broken, 2, method):
        result.get()


class Split(nn.Module):
    """Two layers to split, and a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)
        self.last = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(torch.relu(self.up(x))))


def _split(world: World) -> None:
    rw.mesh(dp_replicate=2, tp=2)
    torch.manual_seed(0)
    for method in ("int8", "top-k"):
        model = Split()
        rw.tensor_parallel(model)
        with pytest.raises(ConfigurationError, match="would diverge"):
            rw.replicate(model, compress=method)
    for method in ("bf16", "powersgd"):
        model = Split()
        rw.tensor_parallel(model)
        rw.replicate(model, compress=method)
        for step in range(3):
            model.zero_grad()
            generator = torch.Generator().manual_seed(2 * step + world.rank // 2)
            model(torch.randn(4, 64, generator=generator)).square().mean().backward()
        for copy in (model.down.bias, *model.last.parameters()):
            assert copy.grad is not None
            first, *others = rw.all_gather(own_part(copy.grad))
            assert all(torch.equal(other, first) for other in others)


def test_copies_stay_copies_on_ranks_along_tp(run_ranks: RunRanks) -> None:
    for result in run_ranks(_split, 4):
        result.get()
