# SPDX-License-Identifier: Apache-2.0
"""`hvd.DistributedOptimizer`: N ranks with equal shards step as one rank with the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from on_ranks import one_rank
from replicas import TOLERANCE, Parameters, largest_difference, part
from torch import nn

import rankwise.compat.horovod as hvd
from rankwise import testing

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

BATCH = 12
"""Divides by 1, 2, 3 and 4 ranks."""


class Net(nn.Module):
    """Tied layers, a layer that is never used, and one that is only used on odd ranks, there without effect."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 9)
        self.tied = nn.Linear(9, 9)
        self.tied.weight = self.second.weight
        self.last = nn.Linear(9, 3)
        self.never = nn.Linear(2, 2)
        self.odd = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, odd: bool = False) -> torch.Tensor:
        y = self.last(torch.tanh(self.tied(torch.tanh(self.second(torch.tanh(self.first(x)))))))
        return y + 0.0 * self.odd(x) if odd else y


class Doubled(hvd.Compression.none):
    """A user's own compression: sends float32, and restores the original dtype."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.float(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


COMPRESSION = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16, "own": Doubled}


@dataclass(frozen=True)
class Case:
    """How to train."""

    optimizer: str = "sgd"
    passes: int = 1
    compression: str = "none"
    op: str = "Average"
    predivide: float = 1.0
    groups: str = "none"
    clip: bool = False
    tolerance: float = TOLERANCE
    loss_factor: str = "1"
    """Of one rank, to come to what N ranks do: ``1`` or ``N``."""


def built() -> Net:
    torch.manual_seed(5)
    return Net().double()


def plain(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return (
        torch.randn(BATCH, 6, generator=generator, dtype=torch.float64),
        torch.randn(BATCH, 3, generator=generator, dtype=torch.float64),
    )


def kept(model: nn.Module) -> Parameters:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _train(world: World, case: Case, factor: float) -> Parameters:
    hvd.init()
    model = built()
    groups: Any = {"none": None, "two": 2, "lists": [[model.first.weight, model.last.bias], [model.never.weight]]}
    optimizer = hvd.DistributedOptimizer(
        plain(model, case.optimizer),
        named_parameters=model.named_parameters(),
        compression=COMPRESSION[case.compression],
        backward_passes_per_step=case.passes,
        op=getattr(hvd, case.op),
        gradient_predivide_factor=case.predivide,
        groups=groups[case.groups],
    )
    for step in range(4):
        for micro in range(case.passes):
            x, y = (part(t, world.rank, world.world_size) for t in batch(step * case.passes + micro))
            (nn.functional.mse_loss(model(x, world.rank % 2 == 1), y) * factor).backward()
        if case.clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        if world.world_size > 1:
            assert all(p.grad is not None and not p.grad.any() for p in [*model.never.parameters(), model.odd.bias])
        # With zeros on every rank, as Horovod leaves them: one rank alone has None for what it did not use.
        optimizer.zero_grad(set_to_none=False)
        for unused in (model.never.weight, model.never.bias, model.odd.weight, model.odd.bias):
            unused.grad = None
    used = kept(model)
    return {name: value for name, value in used.items() if not name.startswith(("never", "odd"))}


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(optimizer="adam", passes=3, clip=True),
        Case(passes=3, groups="two", predivide=4.0),
        Case(optimizer="adam", groups="lists", op="Sum", loss_factor="N"),
        Case(compression="fp16", tolerance=2e-3),
        Case(passes=3, compression="fp16", op="Sum", loss_factor="N", tolerance=2e-3),
        Case(compression="own", predivide=2.0, tolerance=1e-5),
    ],
    ids=repr,
)
def test_ranks_with_equal_shards_step_as_one_with_the_whole_batch(run_ranks: RunRanks, case: Case) -> None:
    for world_size in (2, 3, 4):
        reference = one_rank(_train, case, float(world_size) if case.loss_factor == "N" else 1.0)
        results = [result.get() for result in run_ranks(_train, world_size, case, 1.0)]
        for result in results:
            assert largest_difference(result, reference) < case.tolerance
            assert largest_difference(result, results[0]) == 0.0


def _extremes(world: World, op: str) -> bool:
    hvd.init()
    model = built()
    optimizer = hvd.DistributedOptimizer(plain(model, "sgd"), model.named_parameters(), op=getattr(hvd, op))
    x, y = batch(0)
    gradients = [
        torch.autograd.grad(nn.functional.mse_loss(model(part(x, r, 3)), part(y, r, 3)), model.last.weight)[0]
        for r in range(3)
    ]
    expected = {
        "Min": torch.stack(gradients).amin(0), "Max": torch.stack(gradients).amax(0),
        "Product": torch.stack(gradients).prod(0),
    }[op]  # fmt: skip
    nn.functional.mse_loss(model(part(x, world.rank, 3)), part(y, world.rank, 3)).backward()
    optimizer.synchronize()
    return torch.allclose(model.last.weight.grad, expected, rtol=1e-12, atol=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_other_operations_go_element_by_element(op: str) -> None:
    assert all(result.get() for result in testing.run_ranks(_extremes, 3, op))


def _within_sets(world: World) -> Parameters:
    hvd.init()
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 2, 3], [1])]
    own = sets[world.rank % 2 if world.rank < 2 else 0]
    model = built()
    # Every rank wraps both, as scripts do; one it is not in changes nothing here.
    optimizers = [
        hvd.DistributedOptimizer(plain(model, "sgd"), model.named_parameters(), process_set=one) for one in sets
    ]
    place = own.rank()
    for step in range(3):
        x, y = (part(t, place, own.size()) for t in batch(step))
        nn.functional.mse_loss(model(x), y).backward()
        optimizers[sets.index(own)].step()
        optimizers[sets.index(own)].zero_grad()
    # A rank that has finished must still make a call that waits; Horovod's ranks do so in a thread.
    hvd.barrier()
    return {name: value for name, value in kept(model).items() if not name.startswith(("never", "odd"))}


def _alone(_: World) -> Parameters:
    hvd.init()
    model = built()
    optimizer = hvd.DistributedOptimizer(plain(model, "sgd"))
    for step in range(3):
        x, y = batch(step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value for name, value in kept(model).items() if not name.startswith(("never", "odd"))}


def test_gradients_stay_within_a_process_set(run_ranks: RunRanks) -> None:
    reference = one_rank(_alone)
    for result in run_ranks(_within_sets, 4):
        # Each set steps through the whole batches by itself.
        assert largest_difference(result.get(), reference) < TOLERANCE


STEPS = (2, 5, 3)
"""The number of steps of each rank before its data ends."""


def _until_the_data_ends(world: World, compression: str) -> tuple[Parameters, int]:
    hvd.init()
    model = built()
    optimizer = hvd.DistributedOptimizer(
        plain(model, "sgd"), model.named_parameters(), compression=COMPRESSION[compression]
    )
    for step in range(STEPS[world.rank]):
        x, y = (part(t, world.rank, 3) for t in batch(step))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    last = hvd.join()
    return kept(model), last


@pytest.mark.parametrize(("compression", "tolerance"), [("none", TOLERANCE), ("own", 1e-5)])
def test_ranks_that_joined_count_as_zeros(run_ranks: RunRanks, compression: str, tolerance: float) -> None:
    model = built()
    optimizer = plain(model, "sgd")
    for step in range(max(STEPS)):
        for rank, num_steps in enumerate(STEPS):
            if step < num_steps:
                x, y = (part(t, rank, 3) for t in batch(step))
                (nn.functional.mse_loss(model(x), y) / 3).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    results = [result.get() for result in run_ranks(_until_the_data_ends, 3, compression)]
    assert [last for _, last in results] == [1, 1, 1]
    assert largest_difference(results[1][0], kept(model)) < tolerance


def _adasum(world: World, passes: int) -> Parameters:
    hvd.init()
    model = built()
    optimizer = hvd.DistributedOptimizer(
        plain(model, "adam"), model.named_parameters(), backward_passes_per_step=passes, op=hvd.Adasum
    )
    for step in range(3):
        for micro in range(passes):
            x, y = (part(t, world.rank, 2) for t in batch(step * passes + micro))
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return kept(model)


def _combined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot = (a * b).sum()
    weights = [1.0 - dot / (2.0 * (one * one).sum()) if one.any() else torch.tensor(1.0) for one in (a, b)]
    return weights[0] * a + weights[1] * b


@pytest.mark.parametrize("passes", [1, 3])
def test_adasum_combines_how_far_the_ranks_moved(run_ranks: RunRanks, passes: int) -> None:
    models = [built(), built()]
    optimizers = [plain(model, "adam") for model in models]
    for step in range(3):
        starts = kept(models[0])
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            for micro in range(passes):
                x, y = (part(t, rank, 2) for t in batch(step * passes + micro))
                nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            for (name, left), right in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                moved = _combined(left - starts[name], right - starts[name])
                for parameter in (left, right):
                    parameter.copy_(starts[name] + moved)
    for result in run_ranks(_adasum, 2, passes):
        assert largest_difference(result.get(), kept(models[0])) < TOLERANCE
