# SPDX-License-Identifier: Apache-2.0
"""`replicate`: N ranks compute the gradients one rank computes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from on_ranks import one_rank
from replicas import TOLERANCE, Net, Parameters, batches, built, largest_difference, part
from torch import nn
from torch.utils.checkpoint import checkpoint

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World


def _train(world: World, sizes: tuple[int, ...], micro: int, batchnorm: bool, cumulative: bool = False) -> Parameters:
    model = built(lambda: Net(batchnorm=batchnorm))
    if cumulative:
        model.norm.momentum = None
    rw.replicate(model, sync_batchnorm=batchnorm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(batches(sizes)):
        for index in range(micro):
            mine = [part(part(t, index, micro), world.rank, world.world_size) for t in (x, y)]
            if index < micro - 1:
                with rw.no_sync(model):
                    nn.functional.mse_loss(model(mine[0]), mine[1]).backward()
            else:
                nn.functional.mse_loss(model(mine[0]), mine[1]).backward()
        assert model.never.weight.grad is None
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("sizes", "micro", "batchnorm"),
    [
        ((12, 7, 2, 12, 5), 1, False),
        ((12, 7, 13), 3, False),
        ((12, 8, 2, 9), 1, True),
        ((12, 9, 13), 2, True),
    ],
)
def test_uneven_batches_accumulation_and_batchnorm_are_exact(
    run_ranks: RunRanks, sizes: tuple[int, ...], micro: int, batchnorm: bool
) -> None:
    reference = one_rank(_train, sizes, micro, batchnorm)
    for world_size in (2, 3, 4):
        for result in run_ranks(_train, world_size, sizes, micro, batchnorm):
            assert largest_difference(result.get(), reference) < TOLERANCE


def test_statistics_may_be_the_mean_of_all_batches(run_ranks: RunRanks) -> None:
    arguments = ((12, 7, 9, 5), 1, True, True)
    reference = one_rank(_train, *arguments)
    for result in run_ranks(_train, 3, *arguments):
        assert largest_difference(result.get(), reference) < TOLERANCE


class Branches(nn.Module):
    """Which layers are used depends on the rank."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.size = size
        self.shared = nn.Linear(size, size)
        self.branches = nn.ModuleList(nn.Linear(size, size) for _ in range(5))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return self.shared(x) + sum(self.branches[i](x) for i in used)

    def loss(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return self(x.repeat(1, self.size // 6), used).square().mean()


USED = [
    [[0], [1, 3], [3]],
    [[], [], []],
    [[1], [0, 3], []],
    [[3], [0, 1, 2, 3, 4], []],
    [[3], [1], [0]],
    [[0], [], [0, 1]],
]
"""Branches that each of three ranks uses, step by step. What a step leaves in a bucket must not reach the next."""


def _branches(world: World, size: int) -> list[dict[str, torch.Tensor | None]]:
    model = rw.replicate(built(lambda: Branches(size)))
    seen = []
    for step, (x, _) in enumerate(batches([6] * len(USED))):
        model.loss(part(x, world.rank, world.world_size), USED[step][world.rank]).backward()
        seen.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        model.zero_grad()
    return seen


# Small gradients are copied into a bucket together, large ones (64 KiB and more) one by one.
@pytest.mark.parametrize("size", [6, 132])
def test_parameters_used_on_some_ranks_or_none_need_no_flag(run_ranks: RunRanks, size: int) -> None:
    results = [result.get() for result in run_ranks(_branches, 3, size)]
    model = built(lambda: Branches(size))
    for step, (x, _) in enumerate(batches([6] * len(USED))):
        model.zero_grad()
        (sum(model.loss(part(x, rank, 3), USED[step][rank]) for rank in range(3)) / 3).backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        for seen in results:
            got = {n: g for n, g in seen[step].items() if g is not None}
            assert largest_difference(got, expected) < TOLERANCE, f"step {step}"


def _token_weighted(world: World, how: str) -> Parameters:
    def count(tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        del tokens
        return lengths.sum()

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            del lengths
            return self.layer(x)

    model = rw.replicate(built(Tagger), weight=count if how == "argument" else None)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 7, 4, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([7, 1, 3, 2, 6])
    mine, own_lengths = part(x, world.rank, world.world_size), part(lengths, world.rank, world.world_size)
    mask = torch.arange(7)[None, :] < own_lengths[:, None]
    loss = model(mine, own_lengths).square().sum(-1)[mask].mean()
    if how == "block":
        with rw.weight(model, own_lengths.sum()):
            loss.backward()
    else:
        loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("how", ["argument", "block"])
def test_a_mean_over_tokens_is_exact_with_a_given_weight(run_ranks: RunRanks, how: str) -> None:
    reference = one_rank(_token_weighted, how)
    for world_size in (2, 3):
        for result in run_ranks(_token_weighted, world_size, how):
            assert largest_difference(result.get(), reference) < TOLERANCE


def _gan(world: World) -> Parameters:
    torch.manual_seed(0)
    generator_net = rw.replicate(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6)).double())
    critic = rw.replicate(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator_net, critic)]
    for x, z in batches([8, 5, 8]):
        real, noise = (part(t, world.rank, world.world_size) for t in (x, z))
        critic.zero_grad()
        critic(real).square().mean().backward()
        fake = generator_net(noise)
        (critic(fake.detach()) - 1).square().mean().backward()
        optimizers[1].step()
        generator_net.zero_grad()
        critic(fake).square().mean().backward()
        optimizers[0].step()
    both = enumerate((generator_net, critic))
    return {f"{i}.{n}": p.detach().clone() for i, m in both for n, p in m.named_parameters()}


def test_two_models_in_one_step(run_ranks: RunRanks) -> None:
    reference = one_rank(_gan)
    for world_size in (2, 3):
        for result in run_ranks(_gan, world_size):
            assert largest_difference(result.get(), reference) < TOLERANCE


class Checkpointed(Net):
    """Recomputes its middle in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda y: torch.tanh(self.second(torch.tanh(self.first(y)))), x, use_reentrant=False)
        return self.last(x)


def _variant(world: World, kind: str) -> Parameters:
    if kind == "compile":
        model = rw.replicate(torch.compile(built(Net), backend="aot_eager"))
    elif kind == "compile after":
        model = rw.replicate(built(Net))
    else:
        model = rw.replicate(built(Checkpointed))
    called = torch.compile(model, backend="aot_eager") if kind == "compile after" else model
    for x, y in batches([8, 8, 8]):
        mine = [part(t, world.rank, world.world_size) for t in (x, y)]
        nn.functional.mse_loss(called(mine[0]), mine[1]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["compile", "compile after", "activation checkpointing"])
def test_compiled_and_checkpointed_models(run_ranks: RunRanks, kind: str) -> None:
    reference = one_rank(_variant, kind)
    for result in run_ranks(_variant, 2, kind):
        assert largest_difference(result.get(), reference) < TOLERANCE


def _low_precision(world: World, dtype: torch.dtype, native: bool) -> Parameters:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    model = rw.replicate(model.to(dtype) if native else model)
    x, y = (part(t.float(), world.rank, world.world_size) for t in batches([10])[0])
    with torch.autocast("cpu", dtype=dtype, enabled=not native):
        loss = nn.functional.mse_loss(model(x.to(dtype) if native else x).float(), y)
    loss.backward()
    return {n: p.grad.float() for n, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("native", [False, True])
def test_low_precision(run_ranks: RunRanks, dtype: torch.dtype, native: bool) -> None:
    reference = one_rank(_low_precision, dtype, native)
    results = [result.get() for result in run_ranks(_low_precision, 3, dtype, native)]
    for result in results:
        assert largest_difference(result, reference) < 0.02
        assert largest_difference(result, results[0]) == 0.0


def _nan_on_one_rank(world: World) -> list[bool]:
    model = rw.replicate(built(Net))
    x, y = (part(t, world.rank, world.world_size) for t in batches([6])[0])
    loss = nn.functional.mse_loss(model(x), y)
    (loss * float("nan") if world.rank == 1 else loss).backward()
    return [bool(p.grad.isnan().all()) for p in model.parameters() if p.grad is not None]


def test_a_nan_on_one_rank_is_a_nan_on_all(run_ranks: RunRanks) -> None:
    for result in run_ranks(_nan_on_one_rank, 3):
        assert all(result.get())


class Freezing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def _unfreeze(world: World) -> Parameters:
    model = built(Freezing)
    model.body.requires_grad_(requires_grad=False)
    rw.replicate(model)
    for step, (x, y) in enumerate(batches([6, 6, 6, 6])):
        if step == 2:
            model.body.requires_grad_(requires_grad=True)
        x_part, y_part = (part(t, world.rank, world.world_size) for t in (x, y))
        nn.functional.mse_loss(model(x_part), y_part).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_a_layer_unfrozen_later_is_followed(run_ranks: RunRanks) -> None:
    reference = one_rank(_unfreeze)
    for result in run_ranks(_unfreeze, 3):
        assert largest_difference(result.get(), reference) < TOLERANCE


def _broken_backward(world: World) -> Parameters:
    """An error inside backward, caught by the user on every rank, leaves the next step exact."""
    model = rw.replicate(built(Net))
    (first, second) = batches([6, 6])

    def explode(_: torch.Tensor) -> None:
        message = "boom"
        raise FloatingPointError(message)

    # Before any gradient is there, and when those of the last layers are.
    for place in (model.last, model.first):
        hook = place.register_forward_hook(lambda *call: call[-1].register_hook(explode) and None)
        with pytest.raises(FloatingPointError):
            model(part(first[0], world.rank, world.world_size)).sum().backward()
        hook.remove()
    model.zero_grad()
    x, y = (part(t, world.rank, world.world_size) for t in second)
    nn.functional.mse_loss(model(x), y).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_the_step_after_a_broken_backward_is_exact(run_ranks: RunRanks) -> None:
    reference = one_rank(_broken_backward)
    for result in run_ranks(_broken_backward, 2):
        assert largest_difference(result.get(), reference) < TOLERANCE


def _another_broke(world: World) -> Parameters:
    """An error inside the backward of one model, after which another is trained."""
    broken, model = rw.replicate(built(Net)), rw.replicate(built(Net))
    x, y = (part(t, world.rank, world.world_size) for t in batches([6])[0])
    x_of_broken = x.clone().requires_grad_()

    def explode(_: torch.Tensor) -> None:
        raise FloatingPointError

    x_of_broken.register_hook(explode)
    with pytest.raises(FloatingPointError):
        broken(x_of_broken).sum().backward()
    nn.functional.mse_loss(model(x), y).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_a_model_is_exact_after_the_backward_of_another_broke(run_ranks: RunRanks) -> None:
    reference = one_rank(_another_broke)
    for result in run_ranks(_another_broke, 2):
        assert largest_difference(result.get(), reference) < TOLERANCE


def _gradient_penalty(world: World) -> Parameters:
    """torch.autograd.grad through the model is no backward of it."""
    model = rw.replicate(built(Net))
    x, y = (part(t, world.rank, world.world_size) for t in batches([6])[0])
    x.requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (nn.functional.mse_loss(out, y) + slope.square().sum(1).mean()).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_autograd_grad_inside_a_step(run_ranks: RunRanks) -> None:
    reference = one_rank(_gradient_penalty)
    for result in run_ranks(_gradient_penalty, 2):
        assert largest_difference(result.get(), reference) < TOLERANCE


@dataclass
class Output:
    """What torch's trees do not look into."""

    scores: torch.Tensor


class Deep(nn.Module):
    """BatchNorm as the last layer but one, and an output in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5, bias=False)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.norm(self.first(x)))


def _dataclass_output(world: World) -> Parameters:
    model = rw.replicate(built(Deep), sync_batchnorm=True)
    for x, y in batches([9, 7]):
        model.zero_grad()
        mine, target = part(x, world.rank, world.world_size), part(y, world.rank, world.world_size)
        with torch.enable_grad():
            kept = model(mine)
            model(mine[:1].repeat(3, 1))
        nn.functional.mse_loss(kept.scores[:, :3], target).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def test_an_output_in_a_dataclass_and_a_forward_in_between(run_ranks: RunRanks) -> None:
    reference = one_rank(_dataclass_output)
    for result in run_ranks(_dataclass_output, 2):
        assert largest_difference(result.get(), reference) < TOLERANCE


class _Stopped(torch.autograd.Function):
    """Ends backward by an error, between the gradients of two layers."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        del ctx, gradient
        raise ValueError("stopped")


def _caught(world: World, is_warm: bool) -> Parameters:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double() for _ in range(2)]
    first, other = [rw.replicate(model) for model in models] if world.world_size > 1 else models
    x = part(torch.arange(18.0, dtype=torch.float64).view(6, 3).sin(), world.rank, world.world_size)
    if is_warm:
        for model in (first, other):
            model(x).square().mean().backward()
            model.zero_grad()
    loss = other(x).square().mean()
    broken = first[2](_Stopped.apply(first[0](x))).square().mean() + first(x).mean()  # type: ignore[no-untyped-call]
    with contextlib.suppress(ValueError):
        broken.backward()
    loss.backward()
    return {name: one.grad.clone() for name, one in other.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_backward_after_one_that_an_error_ended_is_exact(is_warm: bool) -> None:
    (plain,) = testing.run_ranks(_caught, 1, is_warm)
    for result in testing.run_ranks(_caught, 2, is_warm):
        assert largest_difference(result.get(), plain.get()) < TOLERANCE
