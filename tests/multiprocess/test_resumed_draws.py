# SPDX-License-Identifier: Apache-2.0
"""A run that resumes from a checkpoint draws the random numbers that the uninterrupted run draws."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from on_standin import build_standin, on_standin
from replicas import TOLERANCE, Parameters, largest_difference
from said import listening
from torch import nn
from torch.distributed.tensor import DTensor

import rankwise as rw
from rankwise import testing
from rankwise.comm.session import current

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.world.facts import World

WAYS = ("replicate", "torch", "per_rank", "shard")
"""``torch`` and ``per_rank``: ``replicate`` with these random numbers."""
STOPS = ("in the middle", "after the last batch", "after the loop")


class _Stopped(Exception):
    """The job has saved and ends."""


def _seed(rank: int) -> None:
    torch.manual_seed(rank)
    np.random.seed(rank)  # noqa: NPY002 - the generator that checkpoints hold
    random.seed(rank)


def _noise(x: torch.Tensor) -> torch.Tensor:
    once = torch.rand((), dtype=torch.float64).item() + random.random() + np.random.rand()  # noqa: NPY002
    with rw.as_one_rank():
        noise = torch.randn(len(x), 6, dtype=torch.float64) + np.random.randn(len(x), 6)  # noqa: NPY002
        noise[:, 0] += torch.tensor(random.choices([0.1, 0.2, 0.3], k=len(x)))
    return x * once + noise.to(x.device)


def _train(world: World, folder: str, way: str, stop: str | None) -> Parameters | None:
    """Train for two epochs of three steps, from the newest checkpoint on; return nothing if the job stops."""
    data = torch.randn(13, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _seed(world.rank if way == "per_rank" else 0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 1)).double().to(world.device)
    if way == "shard":
        rw.shard(model)
    else:
        rw.replicate(model, randomness="counter" if way == "replicate" else way)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = rw.DataLoader(data, global_batch_size=5, shuffle=True)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoints = rw.Checkpointer(folder)
    checkpoints.restore(**objects)

    def save_at(place: str) -> None:
        if stop == place:
            checkpoints.save(**objects)
            checkpoints.close()
            raise _Stopped

    try:
        for _ in range(loader.epoch, 2):
            torch.rand(3)  # runs again after a resume within the loop
            for number, x in enumerate(loader):
                model(x if way == "per_rank" else _noise(x)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                save_at({1: STOPS[0], 2: STOPS[1]}.get(number, ""))
            torch.rand(2)
            save_at(STOPS[2])
    except _Stopped:
        return None
    after = {name: value.detach() for name, value in model.state_dict().items()}
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).cpu() for name, value in after.items()}


def _all(world: World, folder: str, ways: tuple[str, ...], stops: bool) -> dict[str, Parameters | None]:
    cases = [f"{way}, {place}" for way in ways for place in STOPS]
    return {
        case: _train(world, f"{folder}/{case}", case.split(", ")[0], case.split(", ")[1] if stops else None)
        for case in cases
    }


def _check(results: list[dict[str, Any]], expected: dict[str, Any], limit: float) -> None:
    for on_rank in results:
        assert {case: d for case in expected if (d := largest_difference(on_rank[case], expected[case])) > limit} == {}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1), (1, 2)])
def test_a_resumed_run_draws_as_an_uninterrupted_one(tmp_path: Path, before: int, after: int) -> None:
    ways = tuple(way for way in WAYS if way != "per_rank" or before == after)
    for result in testing.run_ranks(_all, before, str(tmp_path / "saved"), ways, True):
        assert set(result.get().values()) == {None}
    whole = testing.run_ranks(_all, before, str(tmp_path / "whole"), ways, False)[0].get()
    resumed = [one.get() for one in testing.run_ranks(_all, after, str(tmp_path / "saved"), ways, False)]
    _check(resumed, whole, 0.0 if before == after else TOLERANCE)


@pytest.mark.timeout(240)
def test_a_resumed_run_draws_the_same_on_a_device(tmp_path: Path) -> None:
    build_standin()
    ways = ("replicate", "torch")
    on_standin(_all, 2, str(tmp_path / "saved"), ways, True)
    whole = on_standin(_all, 2, str(tmp_path / "whole"), ways, False)[0]
    _check(on_standin(_all, 2, str(tmp_path / "saved"), ways, False), whole, 0.0)
    _check(on_standin(_all, 1, str(tmp_path / "saved"), ways, False), whole, TOLERANCE)


def _by_torch(world: World, path: str, stop: bool, resume: bool) -> Parameters | None:
    """Train with torch's own loader and torch.save, as docs/checkpoints.md says."""
    _seed(0)
    data = torch.randn(13, 6, dtype=torch.float64)
    model = rw.replicate(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 1)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = rw.DataLoader(data, global_batch_size=5, shuffle=True)
    state: dict[str, Any] = {}
    if resume:
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["generator"])
    for _ in range(loader.epoch, 2):
        for number, x in enumerate(loader):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if stop and number == 1:
                parts = {"model": model, "optimizer": optimizer, "loader": loader}
                state = {name: item.state_dict() for name, item in parts.items()}
                if world.rank == 0:
                    torch.save(state | {"generator": torch.get_rng_state()}, path)
                return None
    return model.state_dict()


def test_a_script_that_saves_the_generator_itself_draws_the_same(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.pt")
    whole = testing.run_ranks(_by_torch, 2, path, False, False)[0].get()
    testing.run_ranks(_by_torch, 2, path, True, False)[0].get()
    resumed = [one.get() for one in testing.run_ranks(_by_torch, 2, path, False, True)]
    assert [largest_difference(one, whole) for one in resumed] == [0.0, 0.0]


def _stop_at_a_signal(_: World, folder: str, is_asked: bool) -> Parameters | None:
    """Train; with ``is_asked``, stop before the first step of the second epoch."""
    _seed(0)
    data = torch.randn(10, 6, dtype=torch.float64)
    model = rw.replicate(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 1)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = rw.DataLoader(data, global_batch_size=5)
    rw.Checkpointer(folder).restore(model=model, optimizer=optimizer, loader=loader)
    if is_asked:
        # Two steps and the end of the epoch are such points, too.
        points = iter([False, False, False, True])
        current().preemption._pass = lambda: next(points)  # type: ignore[method-assign]
    try:
        for _ in range(loader.epoch, 3):
            torch.rand(3)
            for x in loader:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    except SystemExit:
        return {"stopped": torch.tensor([float(loader.epoch), loader.state_dict()["position"]])}
    return model.state_dict()


def test_a_job_that_was_preempted_draws_the_same(tmp_path: Path) -> None:
    stopped = [one.get() for one in testing.run_ranks(_stop_at_a_signal, 2, str(tmp_path / "a"), True)]
    assert [one["stopped"].tolist() for one in stopped] == [[1.0, 0.0], [1.0, 0.0]]
    whole = testing.run_ranks(_stop_at_a_signal, 2, str(tmp_path / "b"), False)[0].get()
    resumed = [one.get() for one in testing.run_ranks(_stop_at_a_signal, 2, str(tmp_path / "a"), False)]
    assert [largest_difference(one, whole) for one in resumed] == [0.0, 0.0]


def _own_states(world: World, folder: str, load: bool) -> tuple[list[float], list[str]]:
    """Draw after a restore on ranks that have seeded differently, or save before those draws."""
    _seed(world.rank + 5)
    optimizer = torch.optim.SGD([torch.zeros(1)])
    logging.getLogger("rankwise").setLevel(logging.INFO)
    with listening() as said:
        if load:
            rw.load(folder, optimizer=optimizer)
        else:
            rw.save(folder, optimizer=optimizer)
    return [random.random(), np.random.rand(), torch.rand(()).item()], [one for one in said if "generators" in one]  # noqa: NPY002


def test_ranks_with_states_of_their_own_get_them_on_as_many_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    saved = [one.get() for one in testing.run_ranks(_own_states, 2, folder, False)]
    assert [one.get() for one in testing.run_ranks(_own_states, 2, folder, True)] == saved
    assert saved[0] != saved[1]
    (drawn, said), *_ = [one.get() for one in testing.run_ranks(_own_states, 3, folder, True)]
    assert drawn == saved[0][0]  # as seeded
    assert len(said) == 1
    assert "torch, Python, NumPy were not restored: the checkpoint has one state for each of its 2 ranks" in said[0]
