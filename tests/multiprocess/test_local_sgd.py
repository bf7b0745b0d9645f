# SPDX-License-Identifier: Apache-2.0
"""Islands: what a round computes, on any mesh; empty batches; checkpoints; an island that dies; what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from on_ranks import one_rank
from replicas import TOLERANCE, Net, batches, built, largest_difference, part
from torch import nn

import rankwise as rw
from rankwise.errors import CollectiveMismatch, ConfigurationError, PeerMissing
from rankwise.parallel.local_sgd.changes import shared_out
from rankwise.testing import RankDied, kill_self
from rankwise.testing import run_ranks as run_plain_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from on_ranks import RunRanks
    from replicas import Parameters

    from rankwise.parallel.local_sgd.rounds import LocalSGD
    from rankwise.parallel.pipeline.steps import Pipeline
    from rankwise.world import World

SIZES = [8, 5, 1, 7, 2, 6]
"""Of the global batches: divisible or not, and too small for every rank."""


class Plain(nn.Sequential):
    """What can be split over ranks, and cut into stages."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def values(model: nn.Module) -> Parameters:
    """Return the whole of each parameter that lies on this rank."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
        if not p.is_meta
    }


def assert_same_on_all_ranks(model: nn.Module) -> None:
    for name, value in values(model).items():
        assert all(torch.equal(other, value) for other in rw.all_gather(value)), name


# -- every=1 with plain SGD is data parallel ---------------------------------------------------------


def _every_step(world: World, islands: int, optimizer_first: bool) -> Parameters:
    if islands < world.world_size:
        rw.mesh(islands=islands, dp_replicate=world.world_size // islands)
    model = built(Net)
    if islands < world.world_size:
        rw.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer_first else None
    outer = rw.local_sgd(model, every=1)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(SIZES):
        step(model, optimizer, part(x, world.rank, world.world_size), part(y, world.rank, world.world_size))
        assert_same_on_all_ranks(model)
    assert outer.num_rounds == len(SIZES)
    return values(model)


@pytest.mark.parametrize(("world_size", "islands"), [(3, 3), (4, 2)])
def test_a_round_of_one_step_of_sgd_is_data_parallel_to_rounding(
    run_ranks: RunRanks, world_size: int, islands: int
) -> None:
    alone = one_rank(_every_step, 1, False)
    for result in run_ranks(_every_step, world_size, islands, world_size == 3):
        assert largest_difference(result.get(), alone) < TOLERANCE


# -- rounds against a simulation on one rank ---------------------------------------------------------


def _outer_step(
    anchor: Parameters, ends: Sequence[tuple[Parameters, float]], momentum: Parameters, diloco: rw.DiLoCo | None
) -> None:
    """Move the anchor, in place, as written in the paper."""
    total = sum(weight for _, weight in ends)
    for name, begun in anchor.items():
        change = sum((begun - end[name]) * (weight / total) for end, weight in ends)
        if diloco is not None:
            momentum[name] = diloco.momentum * momentum[name] + change
            change = diloco.lr * (change + diloco.momentum * momentum[name])
        begun.sub_(change)


@dataclass(frozen=True)
class Way:
    """How islands train."""

    mesh: dict[str, int]
    every: int
    overlap: int
    diloco: rw.DiLoCo | None = None
    islands: int = 2
    num_steps: int = 11

    @property
    def make(self) -> type[nn.Module]:
        return Plain if {"tp", "pp"} & set(self.mesh) else Net

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the global batches; a pipeline alone on its island cannot do without samples."""
        return batches([max(SIZES[number % len(SIZES)], self.mesh.get("pp", 1)) for number in range(self.num_steps)])


class Simulation:
    """Islands of one device each, on this rank, that synchronise in the end."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.models = [built(way.make) for _ in range(way.islands)]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in self.models]
        self.anchor = values(self.models[0])
        self.momentum = {name: torch.zeros_like(value) for name, value in self.anchor.items()}
        self.ends: list[tuple[Parameters, float]] = []
        self.weights = [0.0] * way.islands

    def run(self) -> Parameters:
        """Return the parameters that all islands come to."""
        steps = 0
        for x, y in self.way.batches():
            self._step(x, y)
            steps += 1
            if steps == self.way.overlap:
                self._apply()
            if steps == self.way.every:
                steps = 0
                self._end_round()
                if not self.way.overlap:
                    self._apply()
        self._apply()
        if steps:
            self._end_round()
            self._apply()
        return self.anchor

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        for island, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            own_x, own_y = part(x, island, self.way.islands), part(y, island, self.way.islands)
            self.weights[island] += len(own_x)
            if len(own_x):
                step(model, optimizer, own_x, own_y)

    def _end_round(self) -> None:
        self.ends = list(zip(map(values, self.models), self.weights, strict=True))
        self.weights = [0.0] * self.way.islands

    @torch.no_grad()
    def _apply(self) -> None:
        if not self.ends:
            return
        _outer_step(self.anchor, self.ends, self.momentum, self.way.diloco)
        for model, (end, _) in zip(self.models, self.ends, strict=True):
            for name, parameter in model.named_parameters():
                parameter.copy_(self.anchor[name] + (parameter - end[name]))
        self.ends = []


def _spread(model: nn.Module, mesh: dict[str, int]) -> Pipeline | None:
    if "tp" in mesh:
        rw.tensor_parallel(model, {"0": "column", "2": "row"})
    if "dp_replicate" in mesh:
        rw.replicate(model)
    if "dp_shard" in mesh:
        rw.shard(model)
    if "pp" in mesh:
        example = torch.zeros(4, 6, dtype=torch.float64)
        return rw.pipeline(model, nn.functional.mse_loss, example=example, micro_batches=2)
    return None


def _rounds(world: World, way: Way) -> Parameters:
    if way.mesh:
        rw.mesh(**way.mesh)
    num_local = world.world_size // way.islands
    island, local = divmod(world.rank, num_local)
    model = built(way.make)
    if {"tp", "pp"} & set(way.mesh):
        local, num_local = 0, 1
    pipe = _spread(model, way.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = rw.local_sgd(model, every=way.every, overlap=way.overlap, outer=way.diloco or "mean")
    for x, y in way.batches():
        own_x, own_y = (part(part(one, island, way.islands), local, num_local) for one in (x, y))
        if pipe is None:
            step(model, optimizer, own_x, own_y)
        else:
            optimizer.zero_grad()
            pipe(own_x, own_y)
            optimizer.step()
    outer.synchronize()
    rounds = outer.num_rounds
    outer.synchronize()
    assert outer.num_rounds == rounds, "nothing was left to exchange"
    if pipe is None:
        assert_same_on_all_ranks(model)
    return values(model)


@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        (3, Way({}, every=4, overlap=0, islands=3)),
        (2, Way({}, every=4, overlap=2, diloco=rw.DiLoCo(lr=0.7, momentum=0.9))),
        (4, Way({"islands": 2, "dp_replicate": 2}, every=5, overlap=1, diloco=rw.DiLoCo(lr=0.5, momentum=0.5))),
        (4, Way({"islands": 2, "dp_shard": 2}, every=3, overlap=2, diloco=rw.DiLoCo())),
        (4, Way({"islands": 2, "tp": 2}, every=4, overlap=2)),
        (4, Way({"islands": 2, "pp": 2}, every=4, overlap=3, diloco=rw.DiLoCo())),
    ],
    ids=lambda value: str(value.mesh) if isinstance(value, Way) else str(value),
)
def test_rounds_on_any_mesh_are_those_of_a_simulation_on_one_rank(
    run_ranks: RunRanks, world_size: int, way: Way
) -> None:
    expected = Simulation(way).run()
    found = [result.get() for result in run_ranks(_rounds, world_size, way)]
    for held in found:
        assert largest_difference(held, {name: expected[name] for name in held}) < TOLERANCE
    assert set[str]().union(*found) == set(expected)


# -- what is sent as less; buffers; accumulation -----------------------------------------------------


class Normed(nn.Module):
    """BatchNorm, whose statistics differ between islands, and a layer that is large enough to be compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40)
        self.last = nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def _compressed(world: World) -> None:
    rw.mesh(islands=2, dp_replicate=2)
    for method in ("bf16", "int8", "powersgd"):
        model = rw.replicate(built(Normed), sync_batchnorm=method == "int8")
        outer = rw.local_sgd(model, every=3, outer="diloco", compress=method)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        start = values(model)
        for x, y in batches([16] * 7):
            own_x, own_y = part(x, world.rank, 4), part(y, world.rank, 4)
            optimizer.zero_grad()
            with rw.no_sync(model):
                nn.functional.mse_loss(model(own_x[:2]), own_y[:2]).backward()
            nn.functional.mse_loss(model(own_x[2:]), own_y[2:]).backward()
            optimizer.step()
        assert not all(torch.equal(one, values(model)["first.weight"]) for one in rw.all_gather(model.first.weight))
        statistics = rw.all_gather(model.norm.running_mean)  # type: ignore[arg-type]
        outer.synchronize()
        assert outer.num_rounds == 3
        assert_same_on_all_ranks(model)
        assert not torch.equal(start["first.weight"], model.first.weight)
        expected = (statistics[0] + statistics[2]) / 2
        assert torch.allclose(model.norm.running_mean, expected, rtol=1e-12, atol=1e-14)  # type: ignore[arg-type]
        assert not torch.equal(statistics[0], statistics[2])
        assert model.norm.num_batches_tracked == 14


def test_compressed_changes_are_the_same_bits_everywhere_and_buffers_are_means(run_ranks: RunRanks) -> None:
    for result in run_ranks(_compressed, 4):
        result.get()


# -- checkpoints -------------------------------------------------------------------------------------


class Wide(nn.Sequential):
    """Tensors large enough that a save would divide them among the ranks."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 1500), nn.Tanh(), nn.Linear(1500, 3))


def _parts_of_training(world: World, islands: int) -> tuple[nn.Module, torch.optim.Optimizer, LocalSGD]:
    rw.mesh(islands=islands, dp_replicate=world.world_size // islands)
    model = rw.replicate(built(Wide))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, rw.local_sgd(model, every=4, outer="diloco", overlap=3)


def _train(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for x, y in batches([8] * num_steps):
        step(model, optimizer, part(x, world.rank, world.world_size), part(y, world.rank, world.world_size))


def _save(world: World, folder: str, asynchronous: bool) -> Any:
    model, optimizer, outer = _parts_of_training(world, world.world_size)
    _train(world, model, optimizer, 6)  # in the middle of a round, with another one under way
    with rw.Checkpointer(folder, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(model=model, optimizer=optimizer, outer=outer)
    rw.save_weights(f"{folder}/weights.safetensors", model)
    assert outer.num_rounds == 2
    inner = {number: entry["exp_avg"].clone() for number, entry in optimizer.state_dict()["state"].items()}
    return values(model), outer.state_dict()["momentum"], inner


def _restore(world: World, folder: str, islands: int) -> Any:
    model, optimizer, outer = _parts_of_training(world, islands)
    assert rw.Checkpointer(folder).restore(model=model, optimizer=optimizer, outer=outer)
    assert outer.num_rounds == 2
    inner = {number: entry["exp_avg"].clone() for number, entry in optimizer.state_dict()["state"].items()}
    found = values(model), outer.state_dict()["momentum"], inner
    found = [{key: value.clone() for key, value in tree.items()} for tree in found]
    _train(world, model, optimizer, 5)
    outer.synchronize()
    assert outer.num_rounds == 4
    assert_same_on_all_ranks(model)
    return found, values(model)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_ends_the_round_and_holds_the_first_islands_state(tmp_path: Path, asynchronous: bool) -> None:
    saved = [result.get() for result in run_plain_ranks(_save, 3, str(tmp_path), asynchronous)]
    assert any(not torch.equal(saved[1][2][number], one) for number, one in saved[0][2].items()), "islands differ"
    after: dict[int, Parameters] = {}
    for world_size, islands in ((3, 3), (4, 2), (1, 1)):
        for result in run_plain_ranks(_restore, world_size, str(tmp_path), islands):
            found, after[islands] = result.get()
            for tree, expected in zip(found, saved[0], strict=True):
                assert tree.keys() == expected.keys()
                assert all(torch.equal(tree[key], expected[key]) for key in expected)
    assert largest_difference(after[3], after[1]) > TOLERANCE
    model = built(Wide)
    rw.load_weights(tmp_path / "weights.safetensors", model)
    assert all(torch.equal(value, saved[0][0][name]) for name, value in values(model).items())


# -- what goes wrong ---------------------------------------------------------------------------------


def _die(world: World, overlap: int) -> None:
    rw.mesh(islands=2, dp_replicate=2)
    model = rw.replicate(built(Net))
    rw.local_sgd(model, every=2, overlap=overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches([8] * 50)):
        if world.rank == 3 and number == 4:
            kill_self()
        step(model, optimizer, part(x, world.rank, 4), part(y, world.rank, 4))


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_rank_of_an_island_that_is_killed_is_named_by_all(run_ranks: RunRanks, overlap: int) -> None:
    *others, killed = run_ranks(_die, 4, overlap, join_timeout_seconds=20.0)
    assert isinstance(killed.error, RankDied)
    for other in others:
        assert isinstance(other.error, PeerMissing)
        assert other.error.ranks == (3,)


def _refused(world: World) -> None:
    model = nn.Linear(2, 2)
    for arguments, words in (
        ({"every": 0}, "cannot have 0 steps"),
        ({"every": True}, "cannot have True steps"),
        ({"every": 4, "overlap": 4}, "from 0 to 3"),
        ({"every": 4, "outer": "sgd"}, r'"mean", "diloco" or rankwise\.DiLoCo'),
        ({"every": 4, "compress": "zip"}, "'int8'"),
        ({"every": 4 + world.rank}, "what local_sgd\\(\\) was given differs"),
        ({"every": 4, "outer": rw.DiLoCo(lr=0.5 + world.rank)}, "what local_sgd\\(\\) was given differs"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            rw.local_sgd(model, **arguments)  # type: ignore[arg-type]
    for arguments, words in (({"lr": 0}, "no lr 0"), ({"momentum": 1.0}, "no momentum 1.0"), ({"lr": "1"}, "a number")):
        with pytest.raises(ConfigurationError, match=words):
            rw.DiLoCo(**arguments)  # type: ignore[arg-type]
    outer = rw.local_sgd(model, every=4)
    with pytest.raises(ConfigurationError, match="already"):
        rw.local_sgd(nn.Sequential(model), every=4)
    with pytest.raises(ConfigurationError, match=r"call replicate\(\) first, then local_sgd\(\)"):
        rw.replicate(model)
    with pytest.raises(ConfigurationError, match="not of the outer optimizer"):
        outer.load_state_dict({"num_rounds": 1, "momentum": {"weight": torch.zeros(2, 2)}})
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


def test_what_cannot_be_is_refused_on_every_rank() -> None:
    for result in run_plain_ranks(_refused, 2):
        result.get()


def _without_islands(world: World, how: str) -> None:
    model = nn.Linear(2, 2)
    if how == "replicated over all":
        rw.replicate(model)
        words = r"rankwise\.mesh\(islands=\.\.\., dp_replicate=\.\.\.\) first"
    elif how == "no islands":
        rw.mesh(dp_replicate=world.world_size)
        words = "no other island"
    else:
        rw.mesh(islands=2, dp_replicate=2)
        words = r"call rankwise\.replicate\(model\) first"
    with pytest.raises(ConfigurationError, match=words):
        rw.local_sgd(model, every=2)


@pytest.mark.parametrize(("world_size", "how"), [(2, "replicated over all"), (2, "no islands"), (4, "not spread")])
def test_ranks_that_are_no_islands_are_told_what_to_call(world_size: int, how: str) -> None:
    for result in run_plain_ranks(_without_islands, world_size, how):
        result.get()


def test_work_is_shared_out_evenly() -> None:
    assert shared_out([5, 1, 4, 2], 2) == [0, 0, 1, 1]
    assert shared_out([1, 1], 4) == [0, 1]
    assert shared_out([], 2) == []
