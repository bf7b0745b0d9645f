# SPDX-License-Identifier: Apache-2.0
"""`replicate`: N ranks compute the gradients one rank computes, and the model stays itself."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rankwise as rw
from rankwise.errors import ConfigurationError, ModelMismatch
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world import World

Parameters = dict[str, torch.Tensor]
TOLERANCE = 1e-10


def largest_difference(left: Parameters, right: Parameters) -> float:
    """Return the largest difference, relative to the largest element of each tensor."""
    assert left.keys() == right.keys()
    return max(
        (((left[k] - right[k]).abs().max() / right[k].abs().max().clamp(min=1e-6)).item() for k in right),
        default=0.0,
    )


def part(tensor: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """Return piece ``index`` of ``count``, split as evenly as it goes, the first ones longer."""
    return tensor.tensor_split(count)[index]


class Net(nn.Module):
    """Tied layers, a layer that is never used, one that only odd ranks use, optional BatchNorm."""

    def __init__(self, *, batchnorm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=not batchnorm)
        self.norm = nn.BatchNorm1d(8) if batchnorm else nn.Identity()
        self.second = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.second.weight
        self.last = nn.Linear(8, 3)
        self.never = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.tied(torch.tanh(self.second(x)))))


def batches(sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 6, generator=generator, dtype=torch.float64),
            torch.randn(size, 3, generator=generator, dtype=torch.float64),
        )
        for size in sizes
    ]


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def _train(world: World, sizes: list[int], micro: int, batchnorm: bool) -> Parameters:
    model = rw.replicate(built(lambda: Net(batchnorm=batchnorm)), sync_batchnorm=batchnorm)
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
        ([12, 7, 2, 12, 5], 1, False),
        ([12, 7, 13], 3, False),
        ([12, 8, 2, 9], 1, True),
        ([12, 9, 13], 2, True),
    ],
)
def test_uneven_batches_accumulation_and_batchnorm_are_exact(sizes: list[int], micro: int, batchnorm: bool) -> None:
    reference = run_ranks(_train, 1, sizes, micro, batchnorm)[0].get()
    for world_size in (2, 3, 4):
        for result in run_ranks(_train, world_size, sizes, micro, batchnorm):
            assert largest_difference(result.get(), reference) < TOLERANCE


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
def test_unequal_microsteps_give_the_gradient_of_the_whole_batch(world_size: int) -> None:
    whole = run_ranks(_accumulated_equals_whole, 1, 1)[0].get()
    for result in run_ranks(_accumulated_equals_whole, world_size, 3):
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


def test_gradients_from_before_an_accumulation_stay() -> None:
    model = built(Net)
    first, second, third = batches([9, 4, 6])
    nn.functional.mse_loss(model(first[0]), first[1]).backward()
    x, y = (torch.cat([a, b]) for a, b in zip(second, third, strict=True))
    nn.functional.mse_loss(model(x), y).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for world_size in (1, 2, 3):
        for result in run_ranks(_mixed_accumulation, world_size):
            assert largest_difference(result.get(), expected) < TOLERANCE


class Branches(nn.Module):
    """Which layers are used depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 3)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(5))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return self.shared(x) + sum(self.branches[i](x) for i in used)


def _branches(world: World) -> list[dict[str, torch.Tensor | None]]:
    model = rw.replicate(built(Branches))
    seen = []
    for step, (x, y) in enumerate(batches([6, 6, 6])):
        used = {0: [0], 1: [1, 3], 2: [3]}[world.rank] if step != 1 else []
        x_part, y_part = (part(t, world.rank, world.world_size) for t in (x, y))
        nn.functional.mse_loss(model(x_part, used), y_part).backward()
        seen.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        model.zero_grad()
    return seen


def test_parameters_used_on_some_ranks_or_none_need_no_flag() -> None:
    results = [result.get() for result in run_ranks(_branches, 3)]
    for step in range(3):
        used_somewhere = {0, 1, 3} if step != 1 else set()
        for name, gradient in results[0][step].items():
            expected_none = name.startswith("branches") and int(name.split(".")[1]) not in used_somewhere
            assert (gradient is None) == expected_none, (step, name)
            for other in results[1:]:
                if gradient is None:
                    assert other[step][name] is None
                else:
                    assert torch.equal(gradient, other[step][name])
    model = built(Branches)
    (x, y) = batches([6])[0]
    losses = [
        nn.functional.mse_loss(model(part(x, r, 3), used), part(y, r, 3)) for r, used in enumerate(([0], [1, 3], [3]))
    ]
    (sum(losses) / 3).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    got = {n: g for n, g in results[0][0].items() if g is not None}
    assert largest_difference(got, expected) < TOLERANCE


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
def test_a_mean_over_tokens_is_exact_when_told(how: str) -> None:
    reference = run_ranks(_token_weighted, 1, how)[0].get()
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


def test_two_models_in_one_step() -> None:
    reference = run_ranks(_gan, 1)[0].get()
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
def test_compiled_and_checkpointed_models(kind: str) -> None:
    reference = run_ranks(_variant, 1, kind)[0].get()
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
def test_low_precision(dtype: torch.dtype, native: bool) -> None:
    reference = run_ranks(_low_precision, 1, dtype, native)[0].get()
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


def test_a_nan_on_one_rank_is_a_nan_on_all() -> None:
    for result in run_ranks(_nan_on_one_rank, 3):
        assert all(result.get())


def _itself(world: World) -> None:
    plain = built(Net)
    keys, kind = list(plain.state_dict()), type(plain)
    model = rw.replicate(plain)
    assert model is plain
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert largest_difference(twin.state_dict(), model.state_dict()) == 0.0
        # A copy has no ranks: only this one calls it, and nobody waits.
        if world.rank == 0:
            twin(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    rw.barrier()


def test_the_model_stays_itself_and_its_copies_are_plain() -> None:
    for result in run_ranks(_itself, 2):
        result.get()


def _starts_equal(world: World) -> Parameters:
    torch.manual_seed(world.rank)
    model = rw.replicate(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), sync_batchnorm=True)
    return model.state_dict()


def test_every_rank_starts_from_rank_zero() -> None:
    results = [result.get() for result in run_ranks(_starts_equal, 3)]
    for result in results[1:]:
        assert largest_difference(result, results[0]) == 0.0


def _moving_buffers(world: World) -> tuple[Parameters, Parameters]:
    torch.manual_seed(0)
    model = rw.replicate(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(3):
        model(torch.randn(5, 3, generator=generator)).sum().backward()
    before = {k: v.clone() for k, v in model.named_buffers()}
    model.train()
    torch.nn.Module.__call__(model, torch.randn(5, 3, generator=generator)).sum().backward()
    return before, {n: p.grad for n, p in model.named_parameters()}


def test_buffers_that_change_follow_rank_zero() -> None:
    results = [result.get() for result in run_ranks(_moving_buffers, 2)]
    # Each rank adds its last batch to statistics that were rank zero's: with momentum 0.1 they are close.
    for key, value in results[0][0].items():
        if key.endswith("num_batches_tracked"):
            assert torch.equal(value, results[1][0][key])
        else:
            assert not torch.equal(value, results[1][0][key])
            assert torch.allclose(value, results[1][0][key], atol=0.5)


def _different(world: World, what: str) -> None:
    layers: list[nn.Module] = [nn.Linear(3, 4), nn.Linear(4, 2)]
    if world.rank == 2:
        if what == "shape":
            layers[1] = nn.Linear(4, 3)
        elif what == "dtype":
            layers[1] = nn.Linear(4, 2).double()
        elif what == "number":
            layers.append(nn.Linear(2, 2))
        elif what == "name":
            layers.insert(1, nn.ReLU())
    rw.replicate(nn.Sequential(*layers))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", ["1.weight", "float32[2, 4]", "float32[3, 4]"]),
        ("dtype", ["1.weight", "float64[2, 4]"]),
        ("number", ["nothing", "2.weight"]),
        ("name", ["1.weight", "2.weight"]),
    ],
)
def test_models_that_differ_are_an_error_naming_the_first_difference(what: str, words: list[str]) -> None:
    for result in run_ranks(_different, 3, what):
        assert isinstance(result.error, ModelMismatch)
        text = str(result.error)
        assert "rank 2:" in text
        assert "ranks 0-1:" in text
        for word in words:
            assert word in text


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


def test_a_layer_unfrozen_later_is_followed() -> None:
    reference = run_ranks(_unfreeze, 1)[0].get()
    for result in run_ranks(_unfreeze, 3):
        assert largest_difference(result.get(), reference) < TOLERANCE


def _broken_backward(world: World) -> Parameters:
    """An error inside backward, caught by the user on every rank, leaves the next step exact."""
    model = rw.replicate(built(Net))
    (first, second) = batches([6, 6])

    def explode(_: torch.Tensor) -> None:
        message = "boom"
        raise FloatingPointError(message)

    hidden = model(part(first[0], world.rank, world.world_size))
    hidden.register_hook(explode)
    with pytest.raises(FloatingPointError):
        hidden.sum().backward()
    model.zero_grad()
    x, y = (part(t, world.rank, world.world_size) for t in second)
    nn.functional.mse_loss(model(x), y).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_the_step_after_a_broken_backward_is_exact() -> None:
    reference = run_ranks(_broken_backward, 1)[0].get()
    for result in run_ranks(_broken_backward, 2):
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


def test_autograd_grad_inside_a_step() -> None:
    reference = run_ranks(_gradient_penalty, 1)[0].get()
    for result in run_ranks(_gradient_penalty, 2):
        assert largest_difference(result.get(), reference) < TOLERANCE


def _wrong_calls(_: World) -> list[str]:
    model = nn.Linear(2, 2)
    errors = []

    def attempt(call: Callable[[], object]) -> None:
        with pytest.raises(ConfigurationError) as caught:
            call()
        errors.append(str(caught.value))

    def sync_plain() -> None:
        with rw.no_sync(model):
            pass

    def negative() -> None:
        with rw.weight(model, -1):
            model(torch.ones(2, 2)).sum().backward()

    attempt(sync_plain)
    attempt(lambda: rw.replicate(nn.ReLU()))
    rw.replicate(model)
    attempt(lambda: rw.replicate(model))
    attempt(negative)
    embedding = rw.replicate(nn.Embedding(4, 2, sparse=True))
    if rw.all_reduce(1) > 1:
        attempt(lambda: embedding(torch.tensor([1])).sum().backward())
    return errors


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_calls_say_what_to_do(world_size: int) -> None:
    for result in run_ranks(_wrong_calls, world_size):
        errors = result.get()
        assert "not replicated" in errors[0]
        assert "no parameter that needs a gradient" in errors[1]
        assert "already" in errors[2]
        assert "zero or more" in errors[3]
        if world_size > 1:
            assert "sparse=False" in errors[4]


class Keeper(nn.Module):
    """Buffers that are replaced, that start to change late, that are large, and of an odd dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("late", torch.zeros(2))
        self.register_buffer("table", torch.arange(200_000.0))
        self.register_buffer("odd", torch.zeros(3, dtype=torch.int16))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        mean = x.detach().mean()
        self.replaced = self.replaced + mean
        if self.num_calls > 2:
            self.late.add_(mean)
            self.odd.add_(round(float(mean) * 100))
        return self.layer(x)


def _keep(world: World, large: bool) -> Parameters:
    torch.manual_seed(0)
    model = Keeper()
    if not large:
        model.table = torch.arange(10.0)
    rw.replicate(model)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(5):
        model(torch.randn(4, 3, generator=generator)).sum().backward()
    # One more forward in which nothing is random: what it starts from is equal on all ranks.
    model(torch.zeros(1, 3))
    return {k: v.clone() for k, v in model.named_buffers()}


@pytest.mark.parametrize("large", [False, True])
def test_buffers_replaced_or_changed_late_follow_rank_zero(large: bool) -> None:
    results = [result.get() for result in run_ranks(_keep, 3, large)]
    for other in results[1:]:
        for key, value in results[0].items():
            assert torch.equal(other[key], value), key
    assert results[0]["late"].any()
    assert results[0]["odd"].any()


def _change_after(world: World, how: str) -> str:
    del world
    model = rw.replicate(built(Net))
    x, y = batches([6])[0]
    nn.functional.mse_loss(model(x), y).backward()
    model.zero_grad()
    if how == "a layer":
        model.last = nn.Linear(8, 3).double()
    elif how == "assign":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    else:
        model.float()
        x = x.float()
    with pytest.raises(ConfigurationError) as caught:
        model(x)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("how", "name"), [("a layer", "last.weight"), ("assign", "first.weight"), ("dtype", "first.weight")]
)
def test_a_model_changed_after_replicate_is_an_error(how: str, name: str, world_size: int) -> None:
    for result in run_ranks(_change_after, world_size, how):
        assert f"Parameter {name} " in result.get()
        assert "then" in result.get()


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
def test_an_accumulation_that_starts_oddly_or_is_given_up(how: str) -> None:
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
    for result in run_ranks(_half_cleared, world_size):
        assert isinstance(result.error, ConfigurationError)
        assert "in the middle of an accumulation" in str(result.error)


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


def test_an_output_in_a_dataclass_and_a_forward_in_between() -> None:
    reference = run_ranks(_dataclass_output, 1)[0].get()
    for result in run_ranks(_dataclass_output, 2):
        assert largest_difference(result.get(), reference) < TOLERANCE


class OwnNorm(nn.BatchNorm1d):
    """A subclass, which may do anything."""


def _refused(world: World) -> list[str]:
    del world
    errors = []
    whole = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    rw.replicate(whole[0])
    with pytest.raises(ConfigurationError) as caught:
        rw.replicate(whole)
    errors.append(str(caught.value))
    with pytest.raises(ConfigurationError) as caught:
        rw.replicate(nn.Sequential(nn.Linear(3, 3), OwnNorm(3)), sync_batchnorm=True)
    errors.append(str(caught.value))
    return errors


def test_models_that_cannot_be_exact_are_refused() -> None:
    for result in run_ranks(_refused, 2):
        nested, subclass = result.get()
        assert "replicated already" in nested
        assert "OwnNorm" in subclass
