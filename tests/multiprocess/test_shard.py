# SPDX-License-Identifier: Apache-2.0
"""rankwise.shard: what ranks compute with parts of the parameters is what one device computes."""

from __future__ import annotations

import gc
import math
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from replicas import TOLERANCE, batches, built, largest_difference, part
from said import listening
from sharded_models import Block, Deep
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rankwise import testing
from rankwise.errors import CollectiveMismatch, ConfigurationError, PeerFailed, PeerMissing
from rankwise.replicate.device_mesh import mesh, submesh
from rankwise.replicate.no_sync_and_weight import no_sync, weight
from rankwise.shard.shard import shard

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

SIZES = (8, 7, 3, 2, 1)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters()).items()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in named}


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    named = dict(model.named_parameters()).items()
    grads = {name: p.grad for name, p in named}
    return {k: (g.full_tensor() if isinstance(g, DTensor) else g) if g is not None else None for k, g in grads.items()}


def plain_training() -> tuple[dict[str, torch.Tensor], list[float]]:
    model = built(Deep)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    norms = []
    for x, y in batches(SIZES):
        (model(x) - y).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return whole(model), norms


def train(world: World, sizes: dict[str, int], options: dict[str, Any]) -> tuple[Any, ...]:
    if sizes:
        mesh(**sizes)
    model = built(Deep)
    with torch.no_grad():
        model.last.bias.add_(world.rank)  # rank zero's start counts
        model.scale.add_(world.rank)
    model = shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    norms = []
    for x, y in batches(SIZES):
        xs, ys = part(x, world.rank, world.world_size), part(y, world.rank, world.world_size)
        (model(xs) - ys).square().mean().backward()  # the mean of nothing is NaN
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    least = max(p.to_local().numel() / p.numel() for p in model.parameters() if p.numel() > 8 * world.world_size)
    return whole(model), norms, list(model.state_dict()), isinstance(model, Deep), least


@pytest.mark.parametrize(
    ("world_size", "sizes", "options"),
    [
        (1, {}, {"blocks": [Block], "recompute": True}),
        (2, {}, {"blocks": [Block], "recompute": [Block]}),
        (3, {}, {"blocks": ["layers.*"], "reshard_after_forward": False}),
        (4, {"dp_replicate": 2, "dp_shard": 2}, {}),
    ],
)
def test_training_is_as_on_one_device(
    run_ranks: RunRanks, world_size: int, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    expected, norms = plain_training()
    for result in run_ranks(train, world_size, sizes, options):
        parameters, own_norms, keys, is_deep, largest_part = result.get()
        assert largest_difference(parameters, expected) <= TOLERANCE
        assert own_norms == pytest.approx(norms, rel=1e-10)
        assert keys == list(built(Deep).state_dict())
        assert is_deep
        assert largest_part <= 0.7 if world_size > 1 else largest_part == 1


class _Scaled(Deep):
    """With a parameter of the outermost module, which torch keeps between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, seldom=True) * self.factor


def _train_clearing_late(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Clear gradients between forward and backward; run forward and take a norm between backward and the step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = []
    for _ in range(3):
        outputs = model(x)
        model.zero_grad()
        (outputs - y).square().mean().backward()
        model(x)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
    return norms


def _sharded_clearing_late(world: World, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = shard(built(_Scaled), **options)
    x, y = batches((4,))[0]
    rank, world_size = world.rank, world.world_size
    norms = _train_clearing_late(model, part(x, rank, world_size), part(y, rank, world_size))
    return whole(model), norms


@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": [Block]}, {"reshard_after_forward": False}, {"reshard_after_forward": False, "recompute": True}],
)
def test_the_model_shows_the_shards_between_forward_and_backward(options: dict[str, Any]) -> None:
    plain = built(_Scaled)
    expected_norms = _train_clearing_late(plain, *batches((4,))[0])
    for result in testing.run_ranks(_sharded_clearing_late, 2, options):
        parameters, norms = result.get()
        assert norms == pytest.approx(expected_norms, rel=1e-10)
        assert largest_difference(parameters, whole(plain)) <= TOLERANCE


class _Broken(_Scaled):
    """Raises an error in the middle of one forward; its last layer may be called by itself."""

    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.breaks:
            raise ValueError("a bad batch")
        return y


def _train_after_an_error(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        model.breaks = step == 1
        try:
            hidden = model(x)
        except ValueError:
            optimizer.step()
            continue
        optimizer.zero_grad()
        model.head(hidden).square().mean().backward()
        optimizer.step()


def _sharded_after_an_error(world: World) -> tuple[dict[str, torch.Tensor], list[str]]:
    model = shard(built(_Broken), blocks=[Block])
    with listening() as said:
        _train_after_an_error(model, part(batches((4,))[0][0], world.rank, world.world_size))
    return whole(model), [one for one in said if "cannot continue" in one]


def test_training_continues_after_an_error_in_forward_or_torch_is_said_to_be_too_old() -> None:
    plain = built(_Broken)
    _train_after_an_error(plain, batches((4,))[0][0])
    results = [result.get() for result in testing.run_ranks(_sharded_after_an_error, 2)]
    if not hasattr(FSDPModule, "reset_iter_state"):
        assert len(results[0][1]) == 1
        return
    for parameters, said in results:
        assert not said
        assert largest_difference(parameters, whole(plain)) <= TOLERANCE


MICROSTEPS = ((5, 3, 1), (4, 4), (2,))
"""Samples of each microstep of each accumulation, over all ranks."""


def plain_accumulation() -> dict[str, torch.Tensor | None]:
    """Gradients of three steps, added up, each the mean over its samples. Only the first uses all parameters."""
    model = built(Deep)
    for sizes in MICROSTEPS:
        data = batches(sizes)
        x, y = (torch.cat(tensors) for tensors in zip(*data, strict=True))
        (model(x, seldom=sizes == MICROSTEPS[0]) - y).square().mean().backward()
    return gradients(model)


def accumulate(world: World, sizes: dict[str, int], precision: str | None = None) -> dict[str, torch.Tensor | None]:
    if sizes:
        mesh(**sizes)
    model = shard(built(Deep), mixed_precision=precision)
    for step in MICROSTEPS:
        *earlier, last = batches(step)
        for x, y in earlier:
            xs, ys = part(x, world.rank, world.world_size), part(y, world.rank, world.world_size)
            with no_sync(model), weight(model, len(xs)):
                (model(xs, seldom=step == MICROSTEPS[0]) - ys).square().mean().backward()
        x, y = last
        xs, ys = part(x, world.rank, world.world_size), part(y, world.rank, world.world_size)
        outputs = model(torch.cat([xs, xs]), seldom=step == MICROSTEPS[0])
        loss = (outputs - torch.cat([ys, ys])).square().mean()  # as if the call did not tell
        with weight(model, len(xs)):
            loss.backward()
    return gradients(model)


@pytest.mark.parametrize(("world_size", "sizes"), [(1, {}), (2, {}), (4, {"dp_replicate": 2, "dp_shard": 2})])
def test_accumulation_is_exact_and_keeps_what_was_exact_before(world_size: int, sizes: dict[str, int]) -> None:
    expected = plain_accumulation()
    for result in testing.run_ranks(accumulate, world_size, sizes):
        found = result.get()
        assert {k for k, v in found.items() if v is None} == {k for k, v in expected.items() if v is None}
        assert (
            largest_difference(
                {k: v for k, v in found.items() if v is not None}, {k: v for k, v in expected.items() if v is not None}
            )
            <= TOLERANCE
        )


def odd_steps(world: World) -> tuple[Any, ...]:
    """Parts of a block on some ranks only; a rank that does not count; a backward that raises."""
    model = shard(built(Deep), blocks=["layers.*"])
    (x, y), (bad, _) = batches((4, 4))
    xs, ys = part(x, world.rank, world.world_size), part(y, world.rank, world.world_size)
    out = model(xs, seldom=world.rank == 1)
    (out - ys).square().mean().backward()
    partly = gradients(model)

    model.zero_grad()
    nothing_counts = world.rank == 1
    with weight(model, 0.0 if nothing_counts else 2.0):
        (model(xs * math.nan if nothing_counts else xs) - ys).square().mean().backward()
    ignored = gradients(model)

    model.zero_grad()
    broke = []
    # Before any gradient is there, and when those of some blocks are.
    for place in (model.last, model.layers[0]):
        hook = place.register_forward_hook(lambda *call: call[-1].register_hook(_break_off) and None)
        try:
            model(bad).sum().backward()
        except ZeroDivisionError:
            broke.append(True)
        hook.remove()
    model.zero_grad()
    (model(xs) - ys).square().mean().backward()
    return partly, ignored, broke, gradients(model)


def _break_off(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_ranks_may_use_different_parts_of_a_block_and_continue_after_an_error() -> None:
    (x, y), _ = batches((4, 4))

    def plain(rows: list[slice], seldom: list[bool]) -> dict[str, torch.Tensor | None]:
        model = built(Deep)
        out = torch.cat([model(x[row], use) for row, use in zip(rows, seldom, strict=True)])
        (out - torch.cat([y[row] for row in rows])).square().mean().backward()
        return gradients(model)

    halves = [slice(0, 2), slice(2, 4)]
    expected = [plain(halves, [False, True]), plain(halves[:1], [False]), plain(halves, [False, False])]
    for result in testing.run_ranks(odd_steps, 2):
        partly, ignored, broke, after = result.get()
        assert broke == [True, True]
        for found, wanted in zip((partly, ignored, after), expected, strict=True):
            assert {k for k, v in found.items() if v is None} == {k for k, v in wanted.items() if v is None}
            assert (
                largest_difference(
                    {k: v for k, v in found.items() if v is not None},
                    {k: v for k, v in wanted.items() if v is not None},
                )
                <= TOLERANCE
            )


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6)) for _ in range(2)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 3))


def alike(world: World) -> tuple[Any, ...]:
    """What must be the same bits: recomputing or not, equal weights or torch alone."""
    found = []
    ((x, _),) = batches((8,))
    xs = part(x, world.rank, world.world_size)
    for recompute in (False, ["layers.*"]):
        model = shard(built(Noisy), recompute=recompute)
        torch.manual_seed(world.rank)
        for _ in range(2):
            model(xs).square().mean().backward()
        found.append(({k: v for k, v in gradients(model).items() if v is not None}, dict(model.named_buffers())))
    ours = shard(built(three_layers), blocks=["1"])
    theirs = built(three_layers)
    fully_shard(theirs[1], mesh=submesh("dp_shard"))
    fully_shard(theirs, mesh=submesh("dp_shard"))
    for model in (ours, theirs):
        model(xs).square().mean().backward()
    pairs = zip(gradients(ours).values(), gradients(theirs).values(), strict=True)
    half = shard(built(three_layers).float(), mixed_precision="bf16")
    half(xs.float()).square().mean().backward()
    kinds = {half(xs.float()).dtype, half[0].weight.dtype, half[0].weight.grad.dtype}
    near = [
        ((a.double() - b).norm() / b.norm()).item()
        for a, b in zip(gradients(half).values(), gradients(theirs).values(), strict=True)
        if a is not None and b is not None
    ]
    return found, all(a is b is None or torch.equal(a, b) for a, b in pairs), kinds, max(near)


def test_recomputing_and_equal_weights_change_no_bit_and_half_precision_little() -> None:
    for result in testing.run_ranks(alike, 2):
        (plain, recomputed), is_torchs, kinds, largest = result.get()
        for one, other in zip(plain, recomputed, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
        assert is_torchs
        assert kinds == {torch.float32}
        assert 1e-6 < largest < 0.05


def unfilled(world: World) -> tuple[str, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        model = Deep().double()
    model.scale = torch.ones(1).double()  # a buffer that was computed already
    model = shard(model)
    ((x, y),) = batches((4,))
    message = ""
    try:
        model(x)
    except (ConfigurationError, PeerFailed) as error:
        message = str(error)
    source = built(Deep).state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, DTensor):
                tensor.copy_(
                    torch.distributed.tensor.distribute_tensor(source[name], tensor.device_mesh, tensor.placements)
                )
            else:
                tensor.copy_(source[name])
    (model(x) - y).square().mean().backward()
    return message, {k: v for k, v in gradients(model).items() if v is not None}


def test_a_model_from_the_meta_device_must_be_filled() -> None:
    model = built(Deep)
    ((x, y),) = batches((4,))
    (model(x) - y).square().mean().backward()
    expected = {k: v for k, v in gradients(model).items() if v is not None}
    for result in testing.run_ranks(unfilled, 2):
        message, found = result.get()
        assert "first.weight was on the meta device in shard() and has not been initialized" in message
        assert largest_difference(found, expected) <= TOLERANCE


def fails_in_a_block(world: World, odd: int) -> None:
    model = shard(built(Deep), blocks=["layers.*"])
    ((x, _),) = batches((4,))
    if world.rank == odd:
        model.layers[1].register_forward_pre_hook(_fail)
    model(x).sum().backward()


def _fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_fails_in_a_block_is_named_by_the_one_that_waits_for_its_parameters(odd: int) -> None:
    results = testing.run_ranks(fails_in_a_block, 2, odd)
    failing, waiting = results[odd], results[1 - odd]
    assert isinstance(failing.error, ZeroDivisionError)
    assert isinstance(waiting.error, PeerFailed)
    assert waiting.error.rank == odd


def is_killed_in_a_block(world: World) -> None:
    model = shard(built(Deep), blocks=["layers.*"])
    ((x, _),) = batches((4,))
    model(x).sum().backward()
    if world.rank == 1:
        model.layers[1].register_forward_pre_hook(lambda *_: testing.kill_self())
    model(x).sum().backward()


def test_a_rank_that_is_killed_in_a_block_is_named_by_the_others() -> None:
    first, killed, last = testing.run_ranks(is_killed_in_a_block, 3)
    assert isinstance(killed.error, testing.RankDied)
    for result in (first, last):
        assert isinstance(result.error, PeerMissing)
        assert "rank 1 exited" in str(result.error)


class TakesEitherFirst(nn.Module):
    """Two blocks of one size, in an order that a rank can change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in "ab"])
        self.first = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1 - self.first](self.layers[self.first](x))


def runs_blocks_in_another_order(world: World) -> None:
    model = shard(built(TakesEitherFirst), blocks=["layers.*"])
    ((x, _),) = batches((4,))
    model(x).sum().backward()
    model.first = world.rank
    model(x).sum().backward()


def test_blocks_that_run_in_another_order_on_a_rank_are_named() -> None:
    for result in testing.run_ranks(runs_blocks_in_another_order, 2):
        assert isinstance(result.error, CollectiveMismatch)
        for rank in range(2):
            assert f"rank {rank}: parameters of layers.{rank} of TakesEitherFirst" in str(result.error)


def gathers_ahead(world: World, ahead: int) -> dict[str, torch.Tensor]:
    """Train with blocks that are gathered before they are needed, as torch's FSDPModule can."""
    model = shard(built(Long), blocks=["layers.*"])
    layers: list[Any] = list(model.layers)
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(number - ahead, 0) : number][::-1])
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for x, y in batches((8, 4, 8)):
        xs, ys = part(x, world.rank, world.world_size), part(y, world.rank, world.world_size)
        (model(xs) - ys).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


class Long(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


@pytest.mark.parametrize("ahead", [1, 4])
def test_blocks_gathered_ahead_change_no_bit(ahead: int) -> None:
    expected = testing.run_ranks(gathers_ahead, 2, 0)
    for early, plain in zip(testing.run_ranks(gathers_ahead, 2, ahead), expected, strict=True):
        assert largest_difference(early.get(), plain.get()) == 0


class TwoBlocks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(128, 128), nn.Linear(128, 128))


def computes_in_a_wider_dtype(world: World) -> dict[str, torch.Tensor | None]:
    """The parameters of a block, gathered in float64, are larger than the memory that is kept for them."""
    model = built(TwoBlocks).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64, output_dtype=torch.float64)
    shard(model, blocks=["0", "1"], mixed_precision=policy)
    x = torch.eye(128, dtype=torch.float64)
    model(part(x, world.rank, world.world_size)).square().mean().backward()
    return gradients(model)


def test_blocks_that_are_gathered_in_a_wider_dtype_are_exact() -> None:
    model = built(TwoBlocks).float().double()
    model(torch.eye(128, dtype=torch.float64)).square().mean().backward()
    for result in testing.run_ranks(computes_in_a_wider_dtype, 2):
        for name, gradient in result.get().items():
            torch.testing.assert_close(gradient, gradients(model)[name].float())


class GivesViews(nn.Module):
    """Blocks that return views, which are added to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.Unflatten(-1, (2, 3))) for _ in "ab"])
        self.attention = nn.MultiheadAttention(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            y += x.view(y.shape)
            x = y.flatten(1)
        return self.attention(x, x, x, need_weights=False)[0]


def one_more(world: World) -> tuple[dict[str, torch.Tensor | None], bool, str]:
    """Views changed in place; a model without references; a forward that one rank runs alone."""
    model = shard(built(GivesViews), blocks=["layers.*", "attention.*"])
    ((x, _),) = batches((4,))
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()
    found = gradients(model)
    left = weakref.ref(model)
    del model
    gc.collect()
    model = shard(built(three_layers))
    message = ""
    try:
        if world.rank == 0:
            with torch.no_grad():
                model(x)
        model(x)
    except CollectiveMismatch as error:
        message = str(error)
    return found, left() is None, message


def test_views_are_as_on_one_device_models_are_let_go_and_a_forward_of_one_rank_is_an_error() -> None:
    model = built(GivesViews)
    ((x, _),) = batches((4,))
    model(x).square().mean().backward()
    expected = {k: v for k, v in gradients(model).items() if v is not None}
    for result in testing.run_ranks(one_more, 2):
        found, is_gone, message = result.get()
        assert largest_difference({k: v for k, v in found.items() if v is not None}, expected) <= TOLERANCE
        assert is_gone
        assert "rank 0: forward 1 of a sharded Sequential, without gradients" in message
        assert "rank 1: forward 1 of a sharded Sequential, with gradients" in message


def unfreezes(world: World) -> dict[str, torch.Tensor | None]:
    model = built(Deep)
    model.layers[1].requires_grad_(False)
    model.first.requires_grad_(False)
    shard(model, blocks=["layers.*"])
    for step, (x, y) in enumerate(batches((4, 5, 6))):
        model.zero_grad()
        if step == 1:
            model.layers[1].up.requires_grad_(True)
            model.first.requires_grad_(True)
        xs, ys = part(x, world.rank, world.world_size), part(y, world.rank, world.world_size)
        (model(xs) - ys).square().mean().backward()
    return gradients(model)


def test_layers_unfrozen_later_are_followed() -> None:
    model = built(Deep)
    model.layers[1].requires_grad_(False)
    model.layers[1].up.requires_grad_(True)
    x, y = batches((4, 5, 6))[-1]
    (model(x) - y).square().mean().backward()
    expected = gradients(model)
    for result in testing.run_ranks(unfreezes, 2):
        found = result.get()
        assert {k for k, v in found.items() if v is None} == {k for k, v in expected.items() if v is None}
        found, wanted = ({k: v for k, v in one.items() if v is not None} for one in (found, expected))
        assert largest_difference(found, wanted) <= TOLERANCE
