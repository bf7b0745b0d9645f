# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of state that is spread over the ranks: each writes and reads its part, and all make up the whole."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from arrangements import ARRANGEMENTS, Net, built, check, mesh_of, step, tensors_of, trained
from torch import nn

from rankwise.checkpoint import files, layouts
from rankwise.checkpoint import save as saving
from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.load import load
from rankwise.checkpoint.save import save
from rankwise.comm.collectives import barrier
from rankwise.errors import CheckpointError, PeerFailed, RankwiseError
from rankwise.testing import kill_self, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World


def _save_each(world: World, path: str, names: list[str], asynchronous: bool) -> None:
    for name in names:
        model, optimizer = trained(name, world.world_size)
        with Checkpointer(f"{path}/{name}", asynchronous=asynchronous) as checkpoints:
            checkpoints.save(model=model, optimizer=optimizer, extra={"epoch": 3})
            for tensor in [*tensors_of(model.state_dict()).values(), *tensors_of(optimizer.state_dict()).values()]:
                layouts.local(tensor).zero_()


def _load_each(world: World, path: str, saved: list[str], names: list[str]) -> None:
    reference, reference_optimizer = trained("one", 1)
    expected, expected_optimizer = trained("one", 1)
    step(expected, expected_optimizer)
    for name in names:
        model, optimizer = built(name, world.world_size, seed=1)
        # The first of them into an optimizer that has no state yet, the others over what the one before came to.
        for source in saved:
            extra: dict[str, Any] = {}
            assert Checkpointer(f"{path}/{source}").restore(model=model, optimizer=optimizer, extra=extra)
            assert extra == {"epoch": 3}
            elsewhere = check(model.state_dict(), reference.state_dict())
            check(optimizer.state_dict(), reference_optimizer.state_dict())
            assert (elsewhere > 0) == ("pipeline" in name and world.world_size > 1)
            assert not any(parameter.is_meta for parameter in optimizer.state)
            step(model, optimizer)
            check(model.state_dict(), expected.state_dict())
            check(optimizer.state_dict(), expected_optimizer.state_dict())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_of_four_ranks_under_any_strategy_loads_under_any_other(
    tmp_path: Path, asynchronous: bool
) -> None:
    names = list(ARRANGEMENTS)
    for result in run_ranks(_save_each, 4, str(tmp_path), names, asynchronous):
        result.get()
    reference, optimizer = trained("one", 1)
    for name in names:
        directory = tmp_path / name / "checkpoint-000001"
        trees = load(directory)
        check(trees["model"], reference.state_dict())
        check(trees["optimizer"], optimizer.state_dict())
        assert list(trees["model"]) == list(reference.state_dict())
        # Nothing was gathered, and what several ranks hold was written once.
        sizes = {path.name: path.stat().st_size for path in directory.glob("part-*")}
        assert 8 * 130 * 130 * 3 < sum(sizes.values()) < 1.4 * 8 * 130 * 130 * 3
    if not asynchronous:
        for world_size, targets in ((4, names), (2, ["shard", "pipeline"]), (1, ["one", "shard", "pipeline"])):
            for result in run_ranks(_load_each, world_size, str(tmp_path), names, targets):
                result.get()


def test_a_piece_that_is_split_unevenly_again_lies_where_torch_put_it(tmp_path: Path) -> None:
    # Seven rows over two ranks, then over three: torch's own arithmetic for such DTensors misplaces the last one.
    for result in run_ranks(_save_each, 6, str(tmp_path), ["split and shard"], False):
        result.get()
    model, optimizer = trained("one", 1)
    trees = load(tmp_path / "split and shard" / "checkpoint-000001")
    check(trees["model"], model.state_dict())
    check(trees["optimizer"], optimizer.state_dict())


def _save_and_lose_a_rank(world: World, path: str, asynchronous: bool) -> str:
    model, optimizer = trained("shard", world.world_size)
    checkpoints = Checkpointer(path, asynchronous=asynchronous)
    checkpoints.save(model=model, optimizer=optimizer)
    checkpoints.wait()
    step(model, optimizer)
    if world.rank == 1:
        saving.STAGES["writing the tensors of"] = lambda _: kill_self()
    try:
        checkpoints.save(model=model, optimizer=optimizer)
        checkpoints.wait()
    except RankwiseError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_killed_amid_its_part_costs_that_save_only(tmp_path: Path, asynchronous: bool) -> None:
    first, _ = run_ranks(_save_and_lose_a_rank, 2, str(tmp_path), asynchronous)
    assert "rank 1 exited without reporting" in first.get()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000001"]
    model, optimizer = trained("one", 1)
    trees = load(tmp_path / "checkpoint-000001")
    check(trees["model"], model.state_dict())
    check(trees["optimizer"], optimizer.state_dict())


def _part_sizes(world: World, path: str) -> tuple[int, int]:
    model = nn.Linear(1000, 1001, bias=False)
    _shard_all(model, world.world_size)
    save(path, model=model)
    barrier()
    # What a rank reads of a whole tensor is its region: nothing as large as the model is allocated.
    largest, original = [0], torch.empty

    def measured(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = original(*args, **kwargs)
        if not result.is_meta:
            largest[0] = max(largest[0], result.nbytes)
        return result

    files.torch.empty = measured
    try:
        load(path, model=model)
    finally:
        files.torch.empty = original
    return largest[0], (Path(path) / f"part-{world.rank:05d}.safetensors").stat().st_size


def _shard_all(model: nn.Module, world_size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh_of((world_size,), "dp_shard"))


def test_a_rank_writes_and_reads_no_more_than_it_holds(tmp_path: Path) -> None:
    for result in run_ranks(_part_sizes, 3, str(tmp_path / "c")):
        largest, size = result.get()
        assert largest <= 334 * 1000 * 4
        assert size < 334 * 1000 * 4 + 1000
    entry = json.loads((tmp_path / "c" / "manifest.json").read_text())["tensors"]["model.weight"]
    assert entry["shape"] == [1001, 1000]
    assert [part["offsets"] for part in entry["parts"]] == [[0, 0], [334, 0], [668, 0]]


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except RankwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _save_and_load_what_cannot_be(world: World, path: str) -> dict[str, str]:
    model, optimizer = trained("pipeline", world.world_size)
    # What a rank may still have for a parameter that went elsewhere is not asked for.
    gone = next(parameter for parameter in model.parameters() if parameter.is_meta)
    optimizer.state[gone] = {"step": torch.tensor(99.0), "exp_avg": torch.empty_like(gone)}
    save(f"{path}/good", model=model, optimizer=optimizer)
    nowhere = Net().double().to("meta")
    texts = {
        "saved from nowhere": _refused(lambda: save(f"{path}/bad", model=nowhere)),
        "loaded nowhere": _refused(lambda: load(f"{path}/good", model=nowhere)),
    }
    mesh = mesh_of((world.world_size,), "dp")
    from torch.distributed.tensor import DTensor, Partial, Shard

    summed = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    texts["saved unsummed"] = _refused(lambda: save(f"{path}/bad", sums={"w": summed}))
    # A rank that calls its own piece the whole tensor.
    odd = torch.ones(4) if world.rank else DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    texts["saved in part and whole"] = _refused(lambda: save(f"{path}/odd", odd={"w": odd}))
    sharded, sharding = trained("shard", world.world_size)
    if world.rank:
        del sharding.state[sharded.last.weight]
    texts["saved without an entry"] = _refused(lambda: save(f"{path}/bad", optimizer=sharding))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        texts["loaded again"] = _refused(lambda: load(f"{path}/good", model=model, optimizer=optimizer))
    return texts


def test_parts_that_do_not_cover_the_whole_are_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = (result.get() for result in run_ranks(_save_and_load_what_cannot_be, 2, str(tmp_path)))
    for texts in (first, second):
        assert "CheckpointError: model.scale cannot be saved: it is on the meta" in texts["saved from nowhere"]
        assert "CheckpointError" in texts["loaded nowhere"]
        assert "model.scale is on the meta device on every rank" in texts["loaded nowhere"]
        assert "partial sums are not reduced yet" in texts["saved unsummed"]
        assert texts["saved in part and whole"] == "no error"
        assert (
            "CheckpointError: The state to save differs between ranks: optimizer.state["
            in texts["saved without an entry"]
        )
        assert "rank 1: absent" in texts["saved without an entry"]
        assert texts["loaded again"] == "no error"
    assert not (tmp_path / "bad").exists()
    assert load(tmp_path / "odd")["odd"]["w"].tolist() == [1.0] * 4


def _load_another(world: World, path: str) -> tuple[str, bool]:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4 + world.rank))
    _shard_all(model[0], world.world_size)
    before = [layouts.local(p).clone() for p in model.parameters()]
    text = _refused(lambda: load(path, model=model))
    return text, all(map(torch.equal, before, [layouts.local(p) for p in model.parameters()]))


def _save_plain(world: World, path: str) -> None:
    del world
    save(path, model=nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)))


def test_a_sharded_model_that_does_not_fit_on_one_rank_loads_nowhere(tmp_path: Path) -> None:
    run_ranks(_save_plain, 1, str(tmp_path / "c"))[0].get()
    first, second = (result.get() for result in run_ranks(_load_another, 2, str(tmp_path / "c")))
    assert first[0].startswith(PeerFailed.__name__)
    assert second[0].startswith(CheckpointError.__name__)
    for text, unchanged in (first, second):
        assert "the first difference is at model.1.weight" in text
        assert unchanged
