# SPDX-License-Identifier: Apache-2.0
"""Worker groups: changes that travel as less, buffers, and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from replicas import TOLERANCE, batches, built, largest_difference, part
from torch import nn
from worker_groups import assert_same_on_all_ranks, step, values

import rankwise as rw
from rankwise.testing import run_ranks as run_plain_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from on_ranks import RunRanks
    from replicas import Parameters

    from rankwise.local_sgd.rounds import LocalSGD
    from rankwise.world.facts import World


# -- what is sent as less; buffers; accumulation -----------------------------------------------------


class Normed(nn.Module):
    """BatchNorm, whose statistics differ between worker groups, and a layer that is large enough to be compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40)
        self.last = nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def _compressed(world: World) -> None:
    rw.mesh(worker_groups=2, dp_replicate=2)
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
        assert outer.state_dict()["num_rounds"] == 3
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


def _parts_of_training(world: World, worker_groups: int) -> tuple[nn.Module, torch.optim.Optimizer, LocalSGD]:
    rw.mesh(worker_groups=worker_groups, dp_replicate=world.world_size // worker_groups)
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
    assert outer.state_dict()["num_rounds"] == 2
    inner = {number: entry["exp_avg"].clone() for number, entry in optimizer.state_dict()["state"].items()}
    return values(model), outer.state_dict()["momentum"], inner


def _restore(world: World, folder: str, worker_groups: int) -> Any:
    model, optimizer, outer = _parts_of_training(world, worker_groups)
    assert rw.Checkpointer(folder).restore(model=model, optimizer=optimizer, outer=outer)
    assert outer.state_dict()["num_rounds"] == 2
    inner = {number: entry["exp_avg"].clone() for number, entry in optimizer.state_dict()["state"].items()}
    found = values(model), outer.state_dict()["momentum"], inner
    found = [{key: value.clone() for key, value in tree.items()} for tree in found]
    _train(world, model, optimizer, 5)
    outer.synchronize()
    assert outer.state_dict()["num_rounds"] == 4
    assert_same_on_all_ranks(model)
    return found, values(model)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_ends_the_round_and_holds_the_first_worker_groups_state(tmp_path: Path, asynchronous: bool) -> None:
    saved = [result.get() for result in run_plain_ranks(_save, 3, str(tmp_path), asynchronous)]
    assert any(not torch.equal(saved[1][2][number], one) for number, one in saved[0][2].items()), "worker groups differ"
    after: dict[int, Parameters] = {}
    for world_size, worker_groups in ((3, 3), (4, 2), (1, 1)):
        for result in run_plain_ranks(_restore, world_size, str(tmp_path), worker_groups):
            found, after[worker_groups] = result.get()
            for tree, expected in zip(found, saved[0], strict=True):
                assert tree.keys() == expected.keys()
                assert all(torch.equal(tree[key], expected[key]) for key in expected)
    assert largest_difference(after[3], after[1]) > TOLERANCE
    model = built(Wide)
    rw.load_weights(tmp_path / "weights.safetensors", model)
    assert all(torch.equal(value, saved[0][0][name]) for name, value in values(model).items())


# -- other weights in the middle of a training -------------------------------------------------------


def _other_weights(world: World) -> None:
    for compress, momentum in (("top-k", 0.9), (None, 0.0)):
        model = built(Wide)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = rw.local_sgd(model, every=4, overlap=0, outer=rw.DiLoCo(momentum=momentum), compress=compress)
        others, state = {name: value + 1.0 for name, value in model.state_dict().items()}, outer.state_dict()
        if momentum:
            state["momentum"] = {name: value.clone() for name, value in state["momentum"].items()}
        _train(world, model, optimizer, 4)
        outer.synchronize()
        model.load_state_dict(others)
        if momentum:
            outer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = 0.0
        _train(world, model, optimizer, 4)
        for name, value in values(model).items():
            assert torch.equal(value, others[name]), "nothing of before comes along"


def test_weights_that_are_loaded_between_rounds_are_where_the_next_begins() -> None:
    for result in run_plain_ranks(_other_weights, 2):
        result.get()


def _back_to_an_earlier_state(world: World) -> None:
    for overlap in (0, 2):
        model = built(Wide)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = rw.local_sgd(model, every=4, overlap=overlap, outer=rw.DiLoCo(momentum=0.0))
        weights, state = {name: value.clone() for name, value in model.state_dict().items()}, outer.state_dict()
        # In the middle of a round; with an overlap, what comes of the one before is still under way.
        _train(world, model, optimizer, 5)
        model.load_state_dict(weights)
        outer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = 0.0
        _train(world, model, optimizer, 4)
        outer.synchronize()
        assert outer.state_dict()["num_rounds"] == 1
        for name, value in values(model).items():
            assert torch.equal(value, weights[name]), "nothing of before comes along"


def test_a_state_that_is_loaded_in_the_middle_of_a_round_begins_a_new_one() -> None:
    for result in run_plain_ranks(_back_to_an_earlier_state, 2):
        result.get()


# -- a worker group that has no numbers any more ----------------------------------------------------------


def _no_numbers(world: World) -> None:
    for overlap in (0, 2):
        model = built(Wide)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = rw.local_sgd(model, every=4, overlap=overlap, compress="top-k")
        _train(world, model, optimizer, 3)
        if world.rank == 1:
            torch.nn.init.constant_(model[0].weight, torch.nan)  # type: ignore[index]
        outer.synchronize()
        for value in values(model).values():
            assert all(torch.equal(other.nan_to_num(), value.nan_to_num()) for other in rw.all_gather(value))
            assert all(torch.equal(other.isnan(), value.isnan()) for other in rw.all_gather(value))
        assert bool(values(model)["0.weight"].isnan().any()), "everyone sees it"


def test_worker_groups_are_the_same_also_where_one_has_no_numbers() -> None:
    for result in run_plain_ranks(_no_numbers, 2):
        result.get()
