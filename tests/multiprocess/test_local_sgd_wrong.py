# SPDX-License-Identifier: Apache-2.0
"""Worker groups: loops that are written otherwise, a worker group that dies, and what is refused."""

from __future__ import annotations

from contextlib import contextmanager
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from replicas import Net, batches, built, part
from said import check_said
from torch import nn
from worker_groups import assert_same_on_all_ranks, step, values

import rankwise as rw
from rankwise.errors import CollectiveMismatch, ConfigurationError, PeerFailed, PeerMissing
from rankwise.log import logger
from rankwise.testing import RankDied, kill_self
from rankwise.testing import run_ranks as run_plain_ranks

if TYPE_CHECKING:
    import logging
    from collections.abc import Generator
    from pathlib import Path

    from on_ranks import RunRanks

    from rankwise.world.facts import World


@contextmanager
def _said() -> Generator[list[str]]:
    """Give what is said inside the block, after it."""
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    texts: list[str] = []
    handler = QueueHandler(records)
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
    while not records.empty():
        texts.append(records.get().getMessage())


# -- loops that are written otherwise ----------------------------------------------------------------


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))


def _own_batches(world: World, sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(part(x, world.rank, 2), part(y, world.rank, 2)) for x, y in batches(sizes)]


def _two_optimizers(world: World) -> None:
    model = built(_two_layers)
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.children())
    outer = rw.local_sgd(model, every=1)
    for x, y in _own_batches(world, [6] * 3):
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        first.step()
        second.step()
    outer.synchronize()
    assert_same_on_all_ranks(model)


def _another_optimizer_from_some_step_on(world: World) -> None:
    model = built(_two_layers)
    head = torch.optim.SGD(model[1].parameters(), lr=0.1)  # type: ignore[index]
    outer = rw.local_sgd(model, every=2)
    whole = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(_own_batches(world, [6] * 13)):
        step(model, head if number < 3 else whole, x, y)
    # A step of the first round's successor, two uncounted ones, then each.
    assert outer.state_dict()["num_rounds"] == 5
    outer.synchronize()
    assert_same_on_all_ranks(model)


def _closure(world: World) -> None:
    model = built(_two_layers)
    outer = rw.local_sgd(model, every=4)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
    before = values(model)
    for x, y in _own_batches(world, [6, 6, 0]):

        def loss(optimizer: torch.optim.Optimizer, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            of_batch = nn.functional.mse_loss(model(x), y)
            of_batch.backward()
            return of_batch

        before = values(model)
        adam.step(lambda loss=loss: loss(adam))
        changed = not torch.equal(values(model)["0.weight"], before["0.weight"])
        assert changed == bool(len(x)), "a step without samples changes nothing"
        lbfgs.step(closure=lambda loss=loss: loss(lbfgs))
    outer.synchronize()
    assert_same_on_all_ranks(model)


def _gradients_of_no_backward(world: World) -> None:
    model = built(_two_layers)
    rw.local_sgd(model, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ((x, y),) = _own_batches(world, [6])
    gradients = torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    with pytest.raises(ConfigurationError, match=r"(?s)no backward\(\) since the last step.*autograd\.grad"):
        optimizer.step()


def _large_weights_in_float16(world: World) -> None:
    for dtype, compress in ((torch.float16, None), (torch.float32, "fp16")):
        torch.manual_seed(0)
        model = nn.Linear(6, 3, dtype=dtype)
        rw.local_sgd(model, every=1, compress=compress)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, _ in _own_batches(world, [6] * 2):
            optimizer.zero_grad()
            with rw.weight(model, 1e8):
                model(x.to(dtype)).float().square().mean().backward()
            optimizer.step()
        assert all(bool(value.isfinite().all()) for value in values(model).values())
        assert_same_on_all_ranks(model)


def _constant_buffers(world: World) -> None:
    model = built(_two_layers)
    lowest, own = torch.full((2,), torch.finfo(torch.float32).min), torch.tensor(1.0 + world.rank)
    kept = {"lowest": lowest, "short": torch.full((2,), 6e4, dtype=torch.float16), "none": torch.tensor([-torch.inf])}
    for name, value in {**kept, "own": own}.items():
        model.register_buffer(name, value.clone())
    outer = rw.local_sgd(model, every=2)
    model.own.copy_(own)  # type: ignore[operator]
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), *_own_batches(world, [6])[0])
    outer.synchronize()
    for name, value in kept.items():
        assert torch.equal(model.get_buffer(name), value), name
    assert model.own == 1.5


class _OwnOptimizer:
    """None of torch's."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self._parameters:
                parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]


def _steps_that_nobody_counts(world: World) -> None:
    model = built(_two_layers)
    outer = rw.local_sgd(model, every=2)
    optimizer = _OwnOptimizer(model)
    for x, y in _own_batches(world, [6] * 3):
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    with _said() as texts:
        for _ in range(2):
            outer.synchronize()
    check_said(texts, ["3 backward passes of Sequential ran without a step of an optimizer"] * (world.rank == 0))


def _loops(world: World) -> None:
    _two_optimizers(world)
    _another_optimizer_from_some_step_on(world)
    _closure(world)
    _gradients_of_no_backward(world)
    _large_weights_in_float16(world)
    _constant_buffers(world)
    _steps_that_nobody_counts(world)


def test_other_loops_keep_worker_groups_equal_or_raise_an_error() -> None:
    for result in run_plain_ranks(_loops, 2):
        result.get()


# -- what goes wrong ---------------------------------------------------------------------------------


def _die(world: World, dying: int) -> None:
    rw.mesh(worker_groups=2, dp_replicate=2)
    model = rw.replicate(built(Net))
    rw.local_sgd(model, every=2, overlap=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches([8] * 50)):
        if world.rank == dying and number == 4:
            kill_self()
        step(model, optimizer, part(x, world.rank, 4), part(y, world.rank, 4))


@pytest.mark.parametrize("dying", [1, 3])
def test_a_rank_of_an_worker_group_that_is_killed_is_named_by_all(run_ranks: RunRanks, dying: int) -> None:
    others = run_ranks(_die, 4, dying, join_timeout_seconds=20.0)
    killed = others.pop(dying)
    assert isinstance(killed.error, RankDied)
    for other in others:
        assert isinstance(other.error, PeerMissing)
        assert other.error.ranks == (dying,)


def _fail_in_a_long_round(world: World) -> None:
    model = built(_two_layers)
    rw.local_sgd(model, every=10**9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ((x, y),) = _own_batches(world, [6])
    while True:
        step(model, optimizer, x, y)
        if world.rank == 1:
            raise ValueError("of a worker group")


def test_worker_groups_are_notified_of_a_failure_in_the_middle_of_a_round() -> None:
    first, failed = run_plain_ranks(_fail_in_a_long_round, 2, timeout_seconds=30.0)
    assert isinstance(failed.error, ValueError)
    assert isinstance(first.error, PeerFailed)
    assert first.error.rank == 1


def _refused(world: World) -> None:
    model = nn.Linear(2, 2)
    for arguments, words in (
        ({"every": 0}, "at least 1, got 0"),
        ({"every": True}, "at least 1, got True"),
        ({"every": 4, "overlap": 4}, "from 0 to 3"),
        ({"every": 4, "outer": "sgd"}, r'"mean", "diloco" or rankwise\.DiLoCo'),
        ({"every": 4, "outer": np.ones(2)}, r"Unknown outer=array"),
        ({"every": 4, "compress": "zip"}, "'int8'"),
        ({"every": 4 + world.rank}, "the configuration of local_sgd\\(\\) differs"),
        ({"every": 4, "outer": rw.DiLoCo(lr=0.5 + world.rank)}, "the configuration of local_sgd\\(\\) differs"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            rw.local_sgd(model, **arguments)  # type: ignore[arg-type]
    for arguments, words in (
        ({"lr": 0}, "above 0, got 0"),
        ({"momentum": 1.0}, "below 1, got 1.0"),
        ({"lr": "1"}, "a number"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            rw.DiLoCo(**arguments)  # type: ignore[arg-type]
    outer = rw.local_sgd(model, every=4)
    with pytest.raises(ConfigurationError, match="already"):
        rw.local_sgd(nn.Sequential(model), every=4)
    with pytest.raises(ConfigurationError, match=r"call replicate\(\) first, then local_sgd\(\)"):
        rw.replicate(model)
    with pytest.raises(ConfigurationError, match="not belong to the outer optimizer"):
        outer.load_state_dict({"num_rounds": 1, "momentum": {"weight": torch.zeros(2, 2)}})
    other = rw.local_sgd(nn.Linear(2, 2), every=4, outer="diloco")
    with pytest.raises(ConfigurationError, match=r"(?s)momentum of bias is \[1\]; here it is \[2\]"):
        other.load_state_dict({"num_rounds": 1, "momentum": {"weight": torch.ones(2, 2), "bias": torch.ones(1)}})
    frozen = nn.Sequential(nn.Linear(2, 2).requires_grad_(requires_grad=False), nn.Linear(2, 2))
    rw.local_sgd(frozen, every=1)
    frozen.requires_grad_(requires_grad=True)
    with pytest.raises(ConfigurationError, match="unfrozen after"):
        step(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1), torch.ones(2, 2), torch.ones(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(1 + world.rank):
        step(model, optimizer, torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(CollectiveMismatch, match=r"(?s)after 0 rounds and 1 steps.*after 0 rounds and 2 steps"):
        outer.synchronize()


def test_impossible_arguments_are_refused_on_every_rank() -> None:
    for result in run_plain_ranks(_refused, 2):
        result.get()


def _without_worker_groups(world: World, how: str, folder: str) -> None:
    model = nn.Linear(2, 2)
    if how == "replicated over all":
        rw.replicate(model)
        words = r"rankwise\.mesh\(worker_groups=\.\.\., dp_replicate=\.\.\.\) first"
    elif how == "no groups":
        rw.mesh(dp_replicate=world.world_size)
        words = "requires at least two worker groups"
    else:
        rw.mesh(worker_groups=2, dp_replicate=2)
        words = r"call rankwise\.replicate\(model\) first"
    with pytest.raises(ConfigurationError, match=words):
        rw.local_sgd(model, every=2)
    if how == "not distributed":
        with pytest.raises(ConfigurationError, match=r"(?s)train independently.*call rankwise\.local_sgd"):
            rw.save(folder, model=rw.replicate(model))
        with _said() as texts:
            rw.leave()
        check_said(texts, ["nothing was averaged between them"] * (world.rank == 0))


@pytest.mark.parametrize(("world_size", "how"), [(2, "replicated over all"), (2, "no groups"), (4, "not distributed")])
def test_ranks_without_groups_get_an_error_that_names_the_call(world_size: int, how: str, tmp_path: Path) -> None:
    for result in run_plain_ranks(_without_worker_groups, world_size, how, str(tmp_path)):
        result.get()
