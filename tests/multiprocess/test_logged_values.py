# SPDX-License-Identifier: Apache-2.0
"""Values that a script logs, as means over all samples, in the record of rank zero."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

import rankwise as rw
from rankwise import meter, testing
from rankwise.errors import CollectiveMismatch, ConfigurationError, NotJoined
from rankwise.insight.step_record import read
from rankwise.meter import OPTIMIZER, SCRIPT

if TYPE_CHECKING:
    from pathlib import Path

    from on_ranks import RunRanks

    from rankwise.world.facts import World

SAMPLES = torch.arange(7, dtype=torch.float64)


def _log_and_train(world: World, folder: str) -> None:
    rw.leave()
    store = f"file://{folder}/store"
    with rw.join(init_method=store, rank=world.rank, world_size=world.world_size, report=folder):
        model = rw.replicate(torch.nn.Linear(1, 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            for x in rw.DataLoader(SAMPLES, global_batch_size=3):
                rw.log_value("mean", x.mean())
                rw.log_value("given", float(world.rank), weight=world.rank)
                model(x[:, None]).sum().backward()
                optimizer.step()


def _validate_and_log(world: World, folder: str, how: str) -> None:
    rw.leave()
    store = f"file://{folder}/store"
    with rw.join(init_method=store, rank=world.rank, world_size=world.world_size, report=folder):
        validation = rw.DataLoader(torch.arange(9.0), global_batch_size=3)
        for x in rw.DataLoader(SAMPLES, global_batch_size=3):
            for _ in validation:
                if how == "broken off":
                    break
            rw.log_value("mean", x.mean())
        rw.log_value("after", float(world.rank))


@pytest.mark.parametrize("how", ["to its end", "broken off"])
def test_a_loop_inside_the_loop_changes_no_weights(tmp_path: Path, how: str) -> None:
    for result in testing.run_ranks(_validate_and_log, 2, str(tmp_path), how):
        result.get()
    found = logged(tmp_path)
    assert [value for _, value in found["mean"]] == [1.0, 4.0, 6.0]
    assert [value for _, value in found["after"]] == [0.5]


def logged(folder: Path) -> dict[str, list[tuple[int, float | None]]]:
    """Return what was logged under each name: step and value."""
    (path,) = folder.glob("*rank-00000.steps")
    found: dict[str, list[tuple[int, float | None]]] = {}
    for note in read(path).notes:
        if note["kind"] == "values":
            found.setdefault(note["name"], []).extend(zip(note["steps"], note["values"], strict=True))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_are_means_over_the_samples_of_all_ranks(tmp_path: Path, world_size: int) -> None:
    for result in testing.run_ranks(_log_and_train, world_size, str(tmp_path)):
        result.get()
    found = logged(tmp_path)
    # Batches of samples 0 1 2, 3 4 5 and 6: with two ranks, one has no sample of the last.
    assert found["mean"] == [(step, value) for step, value in enumerate([1.0, 4.0, 6.0] * 3, 1)]
    ranks = range(world_size)
    given = sum(rank * rank for rank in ranks) / sum(ranks) if world_size > 1 else None
    assert [value for _, value in found["given"]] == [given if given is None else pytest.approx(given)] * 9


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_keeps_its_own_last_values_beside_the_means(tmp_path: Path, world_size: int) -> None:
    for result in testing.run_ranks(_log_and_train, world_size, str(tmp_path)):
        result.get()
    kept = [read(path).values for path in sorted(tmp_path.glob("*.steps"))]
    # Of the last batch, which is sample 6, only rank zero has one; of the one before, the others have theirs.
    own = {1: [6.0], 2: [6.0, 5.0], 3: [6.0, 4.0, 5.0]}[world_size]
    assert [values["mean"].own for values in kept] == own
    assert [values["mean"].mean for values in kept] == [6.0] * world_size
    given = [values.get("given") for values in kept]
    if world_size == 1:
        assert given == [None], "no rank gave it a weight"
    else:
        assert [value and value.own for value in given] == [None, *map(float, range(1, world_size))]


def _log_nan(world: World, folder: str) -> None:
    rw.leave()
    with rw.join(init_method=f"file://{folder}/store", rank=world.rank, world_size=world.world_size, report=folder):
        rw.log_value("loss", torch.tensor(math.nan if world.rank == 1 else 1.0))


def test_a_nan_is_kept_by_the_rank_that_logged_it(tmp_path: Path) -> None:
    for result in testing.run_ranks(_log_nan, 3, str(tmp_path)):
        result.get()
    kept = [read(path).values["loss"] for path in sorted(tmp_path.glob("*.steps"))]
    assert [str(value.own) for value in kept] == ["1.0", "nan", "1.0"]
    assert [str(value.mean) for value in kept] == ["nan"] * 3


def _log_odd_things(_: World) -> list[str]:
    said = []
    for value, weight in ((torch.ones(2), None), ("loss", None), (1.0, -1.0), (1.0, math.nan)):
        try:
            rw.log_value("loss", value, weight)  # type: ignore[arg-type]
        except ConfigurationError as error:
            said.append(error.what)
    return said


def test_what_is_no_number_is_refused() -> None:
    (result,) = testing.run_ranks(_log_odd_things, 1)
    assert result.get() == [
        "log_value() takes a number or a tensor of one element, got Tensor.",
        "log_value() takes a number or a tensor of one element, got str.",
        "The weight of log_value() must be at least zero and finite, got -1.0.",
        "The weight of log_value() must be at least zero and finite, got nan.",
    ]


def _log_on_rank_zero(world: World) -> None:
    if world.rank == 0:
        rw.log_value("loss", 1.0)
    rw.all_reduce(1)


@pytest.mark.every_exchange
def test_logging_on_rank_zero_only_is_an_error_on_every_rank(run_ranks: RunRanks) -> None:
    for result in run_ranks(_log_on_rank_zero, 2):
        with pytest.raises(CollectiveMismatch, match="log_value of loss"):
            result.get()


def _log_under_other_names(world: World) -> None:
    rw.log_value(f"loss {world.rank}", 1.0)


def test_other_names_on_other_ranks_are_an_error() -> None:
    for result in testing.run_ranks(_log_under_other_names, 2):
        with pytest.raises(CollectiveMismatch, match="log_value of loss 1"):
            result.get()


def _log_unlike_pairs(world: World) -> None:
    # What is added up together: one value, two, four.
    for name in ("a", "a", "b", "a", "b", *(("a", "b") if world.rank == 1 else ("b", "a"))):
        rw.log_value(name, 1.0)


def test_values_under_other_names_are_never_added_up() -> None:
    assert not any(result.error for result in testing.run_ranks(_log_unlike_pairs, 1))
    for result in testing.run_ranks(_log_unlike_pairs, 3):
        with pytest.raises(CollectiveMismatch, match=r"in different orders"):
            result.get()


def _part_in_a_closure(_: World, folder: str) -> list[int]:
    rw.leave()
    with rw.join(report=folder):
        model = rw.replicate(torch.nn.Linear(2, 1))
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        parts = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).square().sum()
            parts.append(meter.current.enter(OPTIMIZER))
            loss.backward()
            return loss

        optimizer.step(closure)
        parts.append(meter.current.enter(SCRIPT))
    return parts


def test_what_an_optimizer_does_after_its_closure_is_a_part_of_the_update(tmp_path: Path) -> None:
    (result,) = testing.run_ranks(_part_in_a_closure, 1, str(tmp_path))
    *inside, after = result.get()
    assert set(inside) == {OPTIMIZER}
    assert after == SCRIPT


def test_nothing_is_logged_before_joining() -> None:
    with pytest.raises(NotJoined):
        rw.log_value("loss", 1.0)


def _collectives_of(world: World, num: int) -> int:
    from rankwise.comm.session import current

    detector: Any = current().detector
    before = detector.recorder.last
    for step in range(num):
        rw.log_value("loss", float(step))
    return int(detector.recorder.last - before)


def test_many_values_travel_in_few_messages() -> None:
    for result in testing.run_ranks(_collectives_of, 2, 1000):
        # 1, 2, 4, ... 512 at a time, as long as that takes less than a second.
        assert result.get() < 60
