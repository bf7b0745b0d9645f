# SPDX-License-Identifier: Apache-2.0
"""Random numbers in a pipeline: those of `replicate` and of one rank, for every cut, schedule and number of stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from on_ranks import one_rank
from random_models import DRAWING, LENGTH, WIDTH
from replicas import TOLERANCE, Parameters, largest_difference
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from rankwise.world.facts import World

SIZES = ((LENGTH * 2, LENGTH), (9, 4))
"""Samples of an epoch, and of its global batches: as many as a sequence is long, and a copy without samples."""
SOME = ("dropout", "time and samples in one dim", "noise on weights", "poisson")
MORE = (
    ("feature_alpha_dropout", "dropout2d, channels last", "rrelu", "randn_like of a transpose", "multinomial"),
    ("VAE", "noise of sizes on weights", "twice the batch", "encoder, sequence first", "LSTM"),
)
DRAWN = (*SOME, *MORE[0], *MORE[1])


class _Whole(nn.Module):
    """Draws in a block and between blocks."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = DRAWING[name]()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(functional.dropout(self.first(x), 0.2, self.training))
        return functional.dropout(self.last(self.middle(h)), 0.1, self.training)


class _Open(nn.Module):
    """Draws between its blocks only."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        drawing = DRAWING[name]()
        self.a, self.layer, self.b, self._between = drawing.a, drawing.layer, drawing.b, drawing._forward
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(functional.dropout(self.first(x), 0.2, self.training))
        return functional.dropout(self.last(self._between(self, h)), 0.1, self.training)


KINDS = (_Whole, _Open)


def _loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _data(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return list(torch.randn(size, LENGTH, WIDTH, generator=generator, dtype=torch.float64))


def _train(kind: type[nn.Module], name: str, mesh: dict[str, int] | None, **given: Any) -> Parameters:
    model = kind(name).double()
    if mesh is None:
        replica = rw.replicate(model)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            _loss(replica(x), y).backward()
    else:
        step = rw.pipeline(model, _loss, example=torch.stack(_data(8)), **given)  # type: ignore[assignment]
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for size, batch in SIZES:
        for x in rw.DataLoader(_data(size), global_batch_size=batch):
            step(x, x)
            optimizer.step()
            optimizer.zero_grad()
    after = {"generator": torch.rand(2, dtype=torch.float64)}
    return after | {key: one.detach().clone() for key, one in model.state_dict().items() if not one.is_meta}


def _replicated(_: World) -> dict[tuple[type[nn.Module], str], Parameters]:
    return {(kind, name): _train(kind, name, None) for kind in KINDS for name in DRAWN}


def _piped(
    _: World, kind: type[nn.Module], names: tuple[str, ...], mesh: dict[str, int], given: dict[str, Any]
) -> dict[str, Parameters]:
    rw.mesh(**mesh)
    return {name: _train(kind, name, mesh, **given) for name in names}


def _check(num_ranks: int, kind: type[nn.Module], names: tuple[str, ...] = SOME, **given: Any) -> None:
    expected = one_rank(_replicated)
    mesh = given.pop("mesh", {"pp": num_ranks})
    for result in testing.run_ranks(_piped, num_ranks, kind, names, mesh, given):
        apart = {
            name: largest_difference(found, {key: expected[kind, name][key] for key in found})
            for name, found in result.get().items()
        }
        assert {name: one for name, one in apart.items() if not one < TOLERANCE} == {}


@pytest.mark.parametrize("names", MORE)
def test_every_kind_of_draw_is_that_of_one_rank(names: tuple[str, ...]) -> None:
    _check(2, _Open, names, micro_batches=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_draws_do_not_depend_on_the_number_of_stages(num_ranks: int, kind: type[nn.Module]) -> None:
    _check(num_ranks, kind, micro_batches=3)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"])
def test_draws_do_not_depend_on_the_schedule(schedule: str) -> None:
    _check(2, _Open, schedule=schedule, micro_batches=4)


@pytest.mark.parametrize(("kind", "split"), [(_Whole, "middle"), (_Whole, "last"), (_Open, "second"), (_Open, "b")])
def test_draws_do_not_depend_on_the_cut(kind: type[nn.Module], split: str) -> None:
    _check(2, kind, split=split, micro_batches=5)


def test_copies_of_a_pipeline_draw_for_their_samples_and_one_may_have_none() -> None:
    _check(4, _Whole, mesh={"pp": 2, "dp_replicate": 2}, micro_batches=2)


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._drop, x, use_reentrant=False)  # type: ignore[no-any-return]

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.inner(x), 0.4)


def _drawn_again(_: World, split: str | None, num_ranks: int) -> tuple[Parameters, float]:
    rw.mesh(pp=num_ranks)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), _Checkpointed(), nn.Tanh(), _Checkpointed(), nn.Dropout(0.3)
    ).double()
    x = torch.stack(_data(8))
    step = rw.pipeline(model, _loss, example=x, micro_batches=4, split=split)
    torch.manual_seed(1)
    for _ in range(3):
        step(x, x)
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return found, float(torch.rand(1))


@pytest.mark.parametrize("split", ["1", "2", "4"])
def test_checkpointed_draws_do_not_depend_on_the_cut(split: str) -> None:
    expected, number = testing.run_ranks(_drawn_again, 1, None, 1)[0].get()
    for result in testing.run_ranks(_drawn_again, 2, split, 2):
        found, after = result.get()
        assert largest_difference(found, {key: expected[key] for key in found}) < TOLERANCE
        assert after == number


def _around(_: World) -> tuple[Parameters, list[float]]:
    """Draws where only one rank does: in the loss, and on rank zero."""
    rw.mesh(pp=-1)
    model = _Whole("dropout").double()
    x = torch.stack(_data(8))

    def loss_fn(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return output.square().mean()

    step = rw.pipeline(model, loss_fn, example=x, micro_batches=2)
    torch.manual_seed(1)
    for _ in range(3):
        step(x, x)
    outputs = [float(step.predict(x).sum()) for _ in range(2)]
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}, outputs


def test_a_loss_that_draws_leaves_the_draws_of_the_stages_alike_and_predictions_draw() -> None:
    results = [result.get() for result in testing.run_ranks(_around, 2)]
    assert results[0][1] == results[1][1]
    assert results[0][1][0] != results[0][1][1]


def _numbers_differ(_: World) -> list[Parameters]:
    """Return masks of two steps without a loader, in micro-batches."""
    rw.mesh(pp=-1)
    model = nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(64)).double()
    x = torch.ones(8, 64, dtype=torch.float64)
    step = rw.pipeline(model, _loss, example=x, micro_batches=4)
    torch.manual_seed(1)
    return [{"mask": step.predict(x)} for _ in range(2)]


def test_each_sample_and_each_step_has_numbers_of_its_own() -> None:
    for result in testing.run_ranks(_numbers_differ, 2):
        rows = torch.cat([one["mask"] for one in result.get()])
        assert len({tuple(row.tolist()) for row in rows}) == len(rows) == 16
