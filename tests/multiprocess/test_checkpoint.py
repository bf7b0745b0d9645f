# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several ranks: written together, read by any number, and failing together."""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rankwise.checkpoint import files, manifest
from rankwise.checkpoint import save as saving
from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.load import load
from rankwise.checkpoint.save import save
from rankwise.comm.collectives import all_reduce, barrier
from rankwise.errors import CheckpointError, PeerFailed, RankwiseError
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from rankwise.world.facts import World


def _trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(200, 200),
        torch.nn.BatchNorm1d(200),
        torch.nn.Linear(200, 150),
        torch.nn.Linear(150, 130),
    )
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 200)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def _tensors(*objects: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for thing in objects:
        state = thing.state_dict()
        trees = state["state"].values() if "state" in state else [state]
        found += [value for tree in trees for value in tree.values() if isinstance(value, torch.Tensor)]
    return found


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(map(torch.equal, a, b))


def _save(world: World, path: str, asynchronous: bool) -> list[str]:
    model, optimizer = _trained()
    with Checkpointer(path, asynchronous=asynchronous) as checkpoints:
        target = checkpoints.save(model=model, optimizer=optimizer, extra={"epoch": 3, "best": [0.1]})
        for tensor in _tensors(model, optimizer):
            tensor.zero_()
    del world
    return sorted(entry.name for entry in target.iterdir())


def _restore(world: World, path: str) -> bool:
    del world
    model, optimizer = _trained(seed=1)
    extra: dict[str, Any] = {}
    restored = Checkpointer(path).restore(model=model, optimizer=optimizer, extra=extra)
    expected = _tensors(*_trained())
    assert restored is not None
    return _same(_tensors(model, optimizer), expected) and extra == {"epoch": 3, "best": [0.1]}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_any_number_of_ranks_loads_a_checkpoint_of_four(tmp_path: Path, asynchronous: bool) -> None:
    for result in run_ranks(_save, 4, str(tmp_path), asynchronous):
        assert result.get() == [
            "manifest.json",
            *(f"part-0000{rank}.safetensors" for rank in range(4)),
        ]
    sizes = [path.stat().st_size for path in (tmp_path / "checkpoint-000001").glob("part-*")]
    assert max(sizes) < 0.5 * sum(sizes)
    for world_size in (1, 2, 3):
        assert [result.get() for result in run_ranks(_restore, world_size, str(tmp_path))] == [True] * world_size


def test_three_ranks_load_a_checkpoint_of_one(tmp_path: Path) -> None:
    assert run_ranks(_save, 1, str(tmp_path), False)[0].get() == [
        "manifest.json",
        "part-00000.safetensors",
    ]
    assert all(result.get() for result in run_ranks(_restore, 3, str(tmp_path)))


def _save_twice_then_damage(world: World, path: str, file: str, place: int) -> tuple[str, dict[str, Any], str]:
    # Small pieces, so that the damaged byte is in the share of one rank only.
    files.PIECE_BYTES = manifest.PIECE_BYTES = 1024
    checkpoints = Checkpointer(path)
    for number in (1, 2):
        target = checkpoints.save(extra={"n": number, "t": torch.ones(100_000), "u": torch.ones(100_001)})
    if world.rank == 0:
        data = bytearray((target / file).read_bytes())
        data[place] ^= 4
        (target / file).write_bytes(data)
    barrier()
    extra: dict[str, Any] = {}
    restored = checkpoints.restore(extra=extra)
    try:
        load(target, extra={})
    except CheckpointError as error:
        return str(restored), extra, str(error)
    return str(restored), extra, "no error"


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("manifest.json", 300),
        ("part-00000.safetensors", 5),
        ("part-00001.safetensors", 300_000),
        ("part-00000.safetensors", 399_000),
    ],
)
def test_all_ranks_pass_over_what_one_of_them_finds_damaged(tmp_path: Path, file: str, place: int) -> None:
    for result in run_ranks(_save_twice_then_damage, 2, str(tmp_path), file, place):
        restored, extra, error = result.get()
        assert restored == str(tmp_path / "checkpoint-000001")
        assert extra["n"] == 1
        assert f"{file} is damaged" in error


def _save_what_differs(world: World, path: str) -> None:
    save(path, extra={"epoch": 3, "loss": [0.5, 0.25 * world.rank]}, w=torch.ones(3))


def _save_what_differs_in_shape(world: World, path: str) -> None:
    save(path, model={"a": torch.ones(3), "w": torch.ones(3 + world.rank // 2)})


@pytest.mark.parametrize(
    ("fn", "path", "evidence"),
    [
        (
            _save_what_differs,
            "extra.loss[1]",
            "rank 0: 0.0\n            rank 1: 0.25\n            rank 2: 0.5",
        ),
        (
            _save_what_differs_in_shape,
            "model.w",
            "ranks 0-1: float32[3]\n            rank 2: float32[4]",
        ),
    ],
)
def test_state_that_differs_between_ranks_is_an_error_on_all(tmp_path: Path, fn: Any, path: str, evidence: str) -> None:
    for result in run_ranks(fn, 3, str(tmp_path / "c")):
        assert isinstance(result.error, CheckpointError)
        assert f"differs between ranks: {path}." in str(result.error)
        assert evidence in str(result.error)
    assert list(tmp_path.iterdir()) == []


def _fill_the_disk(world: World, path: str, failing: int, asynchronous: bool) -> tuple[str, str, list[int]]:
    checkpoints = Checkpointer(path, asynchronous=asynchronous)
    checkpoints.save(extra={"n": 1})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    state = {"a": torch.ones(100_000), "b": torch.ones(100_000), "n": 2}
    try:
        checkpoints.save(extra=state)
        checkpoints.wait()
    except RankwiseError as error:
        caught = error
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # The ranks go on together.
    total = all_reduce(1)
    extra: dict[str, Any] = {}
    checkpoints.restore(extra=extra)
    checkpoints.save(extra=state)
    checkpoints.close()
    return (
        type(caught).__name__,
        str(caught),
        [total, extra["n"], load(f"{path}/checkpoint-000002")["extra"]["n"]],
    )


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path, failing: int, asynchronous: bool) -> None:
    results = run_ranks(_fill_the_disk, 2, str(tmp_path), failing, asynchronous)
    for rank, result in enumerate(results):
        kind, text, numbers = result.get()
        assert kind == ("CheckpointError" if rank == failing else "PeerFailed")
        assert "File too large" in text
        assert f"rank {failing}/2" in text
        assert numbers == [2, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-000001",
        "checkpoint-000002",
    ]


def _save_where_nobody_can(world: World, path: str) -> None:
    del world
    Checkpointer(path).save(extra={"n": 1})


def test_a_folder_that_cannot_be_written_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = run_ranks(_save_where_nobody_can, 2, str(tmp_path / "file" / "run"))
    assert isinstance(first.error, CheckpointError)
    assert isinstance(second.error, PeerFailed)
    assert "Not a directory" in str(first.error)
    assert "Not a directory" in str(second.error)


def _restore_another_model(world: World, path: str) -> str:
    model = torch.nn.Linear(2, 2 + world.rank)
    before = [p.clone() for p in model.parameters()]
    try:
        load(path, model=model)
    except RankwiseError as error:
        assert _same(before, list(model.parameters()))
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_model_that_does_not_fit_on_one_rank_loads_nowhere(tmp_path: Path) -> None:
    run_ranks(_save_linear, 1, str(tmp_path / "c"))
    first, second = (result.get() for result in run_ranks(_restore_another_model, 2, str(tmp_path / "c")))
    assert second.startswith("CheckpointError")
    assert "the first difference is at model.weight" in second
    assert first.startswith("PeerFailed: Rank 1 failed")
    assert "the first difference is at model.weight" in first


def _save_linear(world: World, path: str) -> None:
    del world
    save(path, model=torch.nn.Linear(2, 2))


def _save_many_in_the_background(world: World, path: str) -> tuple[list[str], int]:
    checkpoints = Checkpointer(path, asynchronous=True, keep=2)
    state = {"a": torch.zeros(50_000), "b": torch.zeros(50_001), "n": 0}
    for number in range(1, 9):
        checkpoints.save(extra=state)
        # Collectives of the training go on beside the save's thread.
        state["a"] += all_reduce(1)
        state["b"] += world.world_size
        state["n"] = number
    checkpoints.close()
    extra: dict[str, Any] = {}
    checkpoints.restore(extra=extra)
    assert extra["a"].eq(14).all()
    assert extra["b"].eq(14).all()
    return sorted(entry.name for entry in checkpoints.directory.iterdir()), extra["n"]


def test_training_continues_during_saves_in_the_background(tmp_path: Path) -> None:
    for result in run_ranks(_save_many_in_the_background, 2, str(tmp_path)):
        assert result.get() == (["checkpoint-000007", "checkpoint-000008"], 7)


def _leave_with_a_save_under_way(world: World, path: str) -> None:
    write = saving.STAGES["writing the tensors of"]
    opened = threading.Event()

    def late(job: saving.SaveJob) -> Any:
        if world.rank == 1:
            opened.wait()
        return write(job)

    saving.STAGES["writing the tensors of"] = late
    Checkpointer(path, asynchronous=True).save(extra={"a": torch.ones(50_000), "b": torch.ones(50_000)})
    threading.Timer(0.5, opened.set).start()


def test_leaving_the_world_completes_the_save_of_all_ranks(tmp_path: Path) -> None:
    for result in run_ranks(_leave_with_a_save_under_way, 2, str(tmp_path)):
        result.get()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]
    assert load(tmp_path / "checkpoint-000001")["extra"]["b"].sum() == 50_000


class _Refusing:
    """An object that may refuse its state."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, int]:
        return {"at": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise KeyError(state["at"])


def _load_what_one_rank_refuses(world: World, path: str) -> list[str]:
    model, optimizer = _trained()
    save(path, model=model, optimizer=optimizer, loader=_Refusing(refuses=False))
    other, other_optimizer = _trained(seed=1)
    before = [tensor.clone() for tensor in _tensors(other, other_optimizer)]
    texts: list[str] = []
    # In another order on each rank, too.
    objects: list[dict[str, Any]] = [
        {"loader": _Refusing(refuses=world.rank == 1), "model": other, "optimizer": other_optimizer},
        {"model": other} if world.rank else {"optimizer": other_optimizer},
    ]
    for given in objects:
        with pytest.raises(RankwiseError) as caught:
            load(path, **dict(sorted(given.items(), reverse=world.rank == 1)))
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
        assert _same(_tensors(other, other_optimizer), before)
    return texts


def test_a_state_that_one_rank_refuses_is_loaded_on_none(tmp_path: Path) -> None:
    first, second = (result.get() for result in run_ranks(_load_what_one_rank_refuses, 2, str(tmp_path / "c")))
    assert first[0].startswith("PeerFailed: Rank 1 failed in loading loader")
    assert "KeyError: 3" in second[0]
    assert "already loaded, on every rank: nothing" in second[0]
    for texts in (first, second):
        assert "rank 0: optimizer" in texts[1]
        assert "rank 1: model" in texts[1]


def _load_from_folders_of_their_own(world: World, path: str, odd: int) -> tuple[str, float]:
    """Every folder holds a whole checkpoint, as on disks of machines, and that of rank ``odd`` another one."""
    model = torch.nn.Linear(2, 2)
    number = 2 if world.rank == odd else 1
    with pytest.raises(CheckpointError) as caught:
        load(f"{path}/{number}", model=model, extra={})
    with pytest.raises(CheckpointError, match="ranks see different files there"):
        Checkpointer(f"{path}/folder-{number}").restore(model=model, extra={})
    return str(caught.value), model.weight.sum().item()


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_checkpoints_that_differ_between_ranks_are_loaded_on_none(tmp_path: Path, odd: int) -> None:
    run_ranks(_save_two, 1, str(tmp_path))[0].get()
    for message, total in (
        result.get() for result in run_ranks(_load_from_folders_of_their_own, 3, str(tmp_path), odd)
    ):
        assert "ranks see different files there" in message
        assert "use a folder on a file system that every rank sees" in message
        assert total not in {4.0, 8.0}, "nothing was loaded"


def _save_two(world: World, path: str) -> None:
    model = torch.nn.Linear(2, 2)
    for number in (1, 2):
        torch.nn.init.constant_(model.weight, float(number))
        save(f"{path}/{number}", model=model, extra={})
        Checkpointer(f"{path}/folder-{number}").save(model=model, extra={})


def _restore_what_one_rank_cannot_read(world: World, path: str, odd: int, trouble: str) -> tuple[str, int]:
    """Rank ``odd`` looks through a link of its own, as through the mount of its machine."""
    own = Path(path) / f"seen-by-{world.rank}"
    if world.rank != odd:
        own.symlink_to(Path(path) / "folder-1")
    elif trouble == "not mounted":
        own.symlink_to("/nowhere/disk")
    elif trouble == "another disk":
        own.mkdir()
    else:
        (own / "checkpoint-000001").mkdir(parents=True)
        for name in ("manifest.json", "part-00000.safetensors"):
            there = Path(path) / "folder-1" / "checkpoint-000001" / name
            (own / "checkpoint-000001" / name).symlink_to(there if name == "manifest.json" else name)
    extra = {"n": 0}
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(own, keep=1).restore(extra=extra)
    return str(caught.value), len(extra)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        ("not mounted", "which does not exist here"),
        ("another disk", ""),
        ("a part", "Too many levels of symbolic links"),
    ],
)
def test_what_one_rank_cannot_read_is_an_error_on_all(tmp_path: Path, odd: int, trouble: str, text: str) -> None:
    run_ranks(_save_two, 1, str(tmp_path))[0].get()
    before = sorted(path.name for path in (tmp_path / "folder-1").iterdir())
    for message, num_entries in (
        result.get() for result in run_ranks(_restore_what_one_rank_cannot_read, 2, str(tmp_path), odd, trouble)
    ):
        assert num_entries == 1
        assert text in message
        assert f"rank {odd}: " in message
    assert sorted(path.name for path in (tmp_path / "folder-1").iterdir()) == before


def _save_where_a_file_is_cut(world: World, path: str) -> tuple[str, str]:
    """The file of rank 1 is shorter where rank 0 looks, as on a file system that lags behind."""
    write_tensors = saving.write_tensors

    def cut(job: saving.SaveJob) -> Any:
        told = write_tensors(job)
        entry = told[0]
        if world.rank == 1 and entry is not None:
            with (job.staging / entry["name"]).open("r+b") as file:
                file.truncate(entry["size_bytes"] - 1)
        return told

    saving.STAGES[next(label for label, stage in saving.STAGES.items() if stage is write_tensors)] = cut
    model, _ = _trained()
    with pytest.raises((CheckpointError, PeerFailed)) as caught:
        save(f"{path}/one", model=model)
    return type(caught.value).__name__, str(caught.value)


def test_a_file_that_has_not_arrived_whole_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    results = [result.get() for result in run_ranks(_save_where_a_file_is_cut, 2, str(tmp_path))]
    assert [kind for kind, _ in results] == ["CheckpointError", "PeerFailed"]
    for _, message in results:
        assert "was not saved: rank zero found that part-00001.safetensors is truncated" in message
    assert list(tmp_path.iterdir()) == []
