# SPDX-License-Identifier: Apache-2.0
"""Saving and restoring on one rank: complete or absent, verified, kept, and never half loaded."""

from __future__ import annotations

import copy
import resource
import shutil
import subprocess
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rankwise.checkpoint import files, folder, manifest
from rankwise.checkpoint import save as saving
from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.load import load
from rankwise.checkpoint.save import save
from rankwise.errors import CheckpointError, ConfigurationError, NotJoined
from rankwise.process_group import join, leave

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    join(device="cpu")
    yield
    leave()


def _model(width: int = 4) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2))


def _trained(width: int = 4) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = _model(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b


def _names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


class Counting:
    """A loader or scheduler of the user's own."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_everything_comes_back(tmp_path: Path, asynchronous: bool) -> None:
    model, optimizer = _trained()
    with Checkpointer(tmp_path / "deep" / "run", asynchronous=asynchronous) as checkpoints:
        assert checkpoints.restore(model=model) is None
        path = checkpoints.save(model=model, optimizer=optimizer, loader=Counting(7), extra={"best": 0.1})
    other, other_optimizer = _trained()
    loader, extra = Counting(), {"best": 1.0, "new": 2}
    restored = checkpoints.restore(model=other, optimizer=other_optimizer, loader=loader, extra=extra)
    assert restored == path == tmp_path / "deep" / "run" / "checkpoint-000001" == checkpoints.latest()
    assert _equal(other.state_dict(), model.state_dict())
    assert _equal(other_optimizer.state_dict(), optimizer.state_dict())
    assert loader.at == 7
    assert extra == {"best": 0.1}
    assert _names(path) == ["manifest.json", "part-00000.safetensors"]


def test_training_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    model, optimizer = _trained()
    save(tmp_path / "c", model=model, optimizer=optimizer)
    other, other_optimizer = _trained()
    load(tmp_path / "c", model=other, optimizer=other_optimizer)
    # What was loaded must not hang on to the files.
    shutil.rmtree(tmp_path / "c")
    batch = torch.randn(8, 3)
    for net, step in ((model, optimizer), (other, other_optimizer)):
        net.zero_grad()
        net(batch).square().mean().backward()
        step.step()
    assert _equal(other.state_dict(), model.state_dict())


def _schedulers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    lr = torch.optim.lr_scheduler
    return {
        "multistep": lr.MultiStepLR(optimizer, [2, 3, 3]),
        "plateau": lr.ReduceLROnPlateau(optimizer),
        "onecycle": lr.OneCycleLR(optimizer, 0.1, total_steps=20),
        "cyclic": lr.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False),
        "lambda": lr.LambdaLR(optimizer, lambda step: 0.9**step),
        "cosine": lr.CosineAnnealingWarmRestarts(optimizer, 3),
        "sequential": lr.SequentialLR(
            optimizer, [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], milestones=[2]
        ),
        "swa": torch.optim.swa_utils.SWALR(optimizer, 0.1),
        "scaler": torch.amp.GradScaler("cpu"),
    }


def test_torch_s_schedulers_and_scalers_come_back(tmp_path: Path) -> None:
    _, optimizer = _trained()
    saved = _schedulers(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scheduler in list(saved.values())[:-1]:
            scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
    save(tmp_path / "c", **saved)
    fresh = _schedulers(_trained()[1])
    load(tmp_path / "c", **fresh)
    for name, scheduler in saved.items():
        assert fresh[name].state_dict() == scheduler.state_dict(), name


def test_tied_weights_are_written_once_and_load_right(tmp_path: Path) -> None:
    def tied() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    save(tmp_path / "c", model=model)
    assert (tmp_path / "c" / "part-00000.safetensors").stat().st_size < 1.1 * 4 * 300 * 300
    load(tmp_path / "c", model=other)
    assert _equal(other.state_dict(), model.state_dict())
    assert other[1].weight is other[0].weight


def test_a_compiled_model_s_checkpoint_fits_the_plain_model(tmp_path: Path) -> None:
    model, other = _model(), _model()
    save(tmp_path / "c", model=torch.compile(model, backend="eager"))
    load(tmp_path / "c", model=other)
    assert _equal(other.state_dict(), model.state_dict())


def test_torch_s_data_parallel_adds_nothing_to_the_names(tmp_path: Path) -> None:
    model, other = _model(), _model()
    save(tmp_path / "c", model=torch.nn.DataParallel(model))
    assert list(load(tmp_path / "c")["model"]) == list(model.state_dict())
    load(tmp_path / "c", model=torch.nn.DataParallel(other))
    assert _equal(other.state_dict(), model.state_dict())


def test_plain_trees_are_loaded_in_place_where_they_can_be(tmp_path: Path) -> None:
    weights = {"w": torch.arange(3.0), "list": [torch.ones(2), 1], "gone": 1}
    save(tmp_path / "c", weights=weights, tensor=torch.ones(3), number=5, items=[1, 2])
    w, inner, alone, items = torch.zeros(3), [torch.zeros(2)], torch.zeros(3), [9]
    mine: dict[str, Any] = {"w": w, "list": inner, "mine": 2}
    back = load(tmp_path / "c", weights=mine, tensor=alone, number=0, items=items)
    assert back["weights"] is mine
    assert mine["w"] is w
    assert w.tolist() == [0, 1, 2]
    assert mine["list"] is inner
    assert inner[1] == 1
    assert alone.tolist() == [1, 1, 1]
    assert back["number"] == 5
    assert items == [1, 2]
    assert list(mine) == ["w", "list", "gone"]
    assert _equal(load(tmp_path / "c")["weights"], weights)


def test_loading_needs_no_world_and_saving_does(tmp_path: Path) -> None:
    save(tmp_path / "c", number=1)
    leave()
    assert load(tmp_path / "c") == {"number": 1}
    with pytest.raises(NotJoined):
        save(tmp_path / "d", number=1)


# -- another model --------------------------------------------------------------------------------


class Renamed(torch.nn.Sequential):
    """A model with one more parameter."""

    def __init__(self) -> None:
        super().__init__(*_model())
        self.scale = torch.nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("make", "key", "evidence"),
    [
        (
            lambda: _model(5),
            "model.0.weight",
            "checkpoint: float32[4, 3]\n            here: float32[5, 3]",
        ),
        (lambda: _model().double(), "model.0.weight", "here: float64[4, 3]"),
        (Renamed, "model.scale", "checkpoint: nothing\n            here: float32[1]"),
        (
            lambda: _model()[:2],
            "model.2.weight",
            "checkpoint: float32[2, 4]\n            here: nothing",
        ),
    ],
)
def test_another_model_s_checkpoint_names_the_first_key_and_changes_nothing(
    tmp_path: Path, make: Any, key: str, evidence: str
) -> None:
    model, _ = _trained()
    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(model=model, loader=Counting(7), a=_model())
    other, loader, a = make(), Counting(1), _model()
    before = copy.deepcopy((other.state_dict(), a.state_dict()))
    for attempt in (checkpoints.restore, lambda **objects: load(path, **objects)):
        with pytest.raises(CheckpointError, match=f"differs first at {key}") as caught:
            attempt(a=a, loader=loader, model=other)
        assert evidence in str(caught.value)
    assert _equal((other.state_dict(), a.state_dict())[0], before[0])
    assert _equal(a.state_dict(), before[1])
    assert loader.at == 1


def test_another_optimizer_s_checkpoint_is_refused(tmp_path: Path) -> None:
    model, optimizer = _trained()
    path = save(tmp_path / "c", optimizer=optimizer)
    parameters = list(model.parameters())
    with pytest.raises(CheckpointError, match=r"(?s)differs first at optimizer.*checkpoint: dict.*here: list"):
        load(path, optimizer=[])
    for other, message in (
        (torch.optim.SGD(parameters, lr=0.1), "class of optimizer"),
        (torch.optim.Adam(parameters[:2]), r"optimizer.param_groups\[0\].params"),
        (
            torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:]}]),
            "optimizer.param_groups",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            load(path, optimizer=other)


def test_state_of_parameters_of_other_shapes_is_refused_and_adafactor_s_and_lbfgs_s_is_not(tmp_path: Path) -> None:
    wide, tall, vector = (torch.nn.Parameter(torch.ones(size)) for size in ((2, 3), (3, 2), (4,)))

    def stepped(make: Any, parameters: list[torch.nn.Parameter]) -> Path:
        optimizer = make(parameters)
        loss = sum((p.sum() for p in parameters), torch.zeros(())).square()
        loss.backward()
        optimizer.step(lambda: loss)
        return save(tmp_path / make.__name__, optimizer=optimizer)

    path = stepped(torch.optim.AdamW, [wide, tall])
    assert load(path, optimizer=torch.optim.AdamW([wide, tall]))
    with pytest.raises(CheckpointError, match=r"(?s)optimizer.state\[0\].exp_avg.*a parameter float32\[3, 2\]"):
        load(path, optimizer=torch.optim.AdamW([tall, wide]))
    # Rows and columns of one, and one vector for everything.
    for make in (torch.optim.Adafactor, torch.optim.LBFGS):
        assert load(stepped(make, [vector, wide]), optimizer=make([vector, wide]))


def test_another_scheduler_s_checkpoint_is_refused(tmp_path: Path) -> None:
    _, optimizer = _trained()
    path = save(tmp_path / "c", scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3))
    assert load(path, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3))
    with pytest.raises(CheckpointError, match=r"(?s)the class of scheduler.*StepLR.*CosineAnnealingLR"):
        load(path, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10))


def test_an_object_that_was_not_saved_is_named(tmp_path: Path) -> None:
    save(tmp_path / "c", model=_model(), loader=Counting())
    with pytest.raises(CheckpointError, match=r"(?s)holds no 'ema'.*it holds model, loader"):
        load(tmp_path / "c", ema=_model())


def test_an_object_that_refuses_its_state_is_named_before_the_model_changes(tmp_path: Path) -> None:
    class Refusing(Counting):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError(state["at"])

    save(tmp_path / "c", model=_model(), loader=Counting(3))
    model = _model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=r"loader refuses its state .*KeyError: 3"):
        load(tmp_path / "c", model=model, loader=Refusing())
    assert _equal(model.state_dict(), before)


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    for keep in (0, -1, True, 1.5):
        with pytest.raises(ConfigurationError, match="cannot keep"):
            Checkpointer(tmp_path, keep=keep)  # type: ignore[arg-type]
    checkpoints = Checkpointer(tmp_path)
    for step in (-1, True, "3"):
        with pytest.raises(ConfigurationError, match="cannot have the number"):
            checkpoints.save(step=step, model=_model())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="nothing to save"):
        checkpoints.save()
    with pytest.raises(ConfigurationError, match="nothing to restore"):
        checkpoints.restore()
    with pytest.raises(ConfigurationError, match="cannot be restored in place"):
        checkpoints.restore(number=3)
    with pytest.raises(CheckpointError, match=r"extra\.when\[0\] cannot be saved: it is a builtins.set"):
        checkpoints.save(extra={"when": [{1}]})
    assert _names(tmp_path) == []


# -- the folder -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (None, [1, 2, 3, 4, 5])])
def test_the_newest_are_kept(tmp_path: Path, keep: int | None, left: list[int], asynchronous: bool) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with Checkpointer(tmp_path, keep=keep, asynchronous=asynchronous) as checkpoints:
        for _ in range(5):
            checkpoints.save(extra={"n": 1})
    assert _names(tmp_path) == [folder.checkpoint_name(number) for number in left] + ["notes.txt"]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, keep=2)
    for _ in range(2):
        checkpoints.save(extra={"t": torch.ones(9)})
    (tmp_path / "checkpoint-000002" / "part-00000.safetensors").write_bytes(b"")
    checkpoints.save(extra={"t": torch.ones(9)})
    assert [path.name for path in tmp_path.iterdir()].count("checkpoint-000001") == 1
    checkpoints.save(extra={"t": torch.ones(9)})
    assert _names(tmp_path) == ["checkpoint-000003", "checkpoint-000004"]


def test_numbers_may_be_steps_and_one_may_be_saved_again(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    extra = {"n": 0}
    for step, name in (
        (300, "checkpoint-000300"),
        (None, "checkpoint-000301"),
        (1_000_000, "checkpoint-1000000"),
    ):
        assert checkpoints.save(step=step, extra={"n": 1}).name == name
    checkpoints.save(step=1_000_000, extra={"n": 2})
    assert checkpoints.restore(extra=extra) == tmp_path / "checkpoint-1000000"
    assert extra == {"n": 2}
    assert len(_names(tmp_path)) == 3


def test_a_number_below_the_newest_is_kept_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpointer(tmp_path, keep=1)
    checkpoints.save(step=9, extra={})
    checkpoints.save(step=3, extra={})
    assert _names(tmp_path) == ["checkpoint-000003", "checkpoint-000009"]
    assert "restore() will take as the newest" in caplog.text


def test_what_is_not_a_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("file", "thesis"):
        with pytest.raises(CheckpointError, match="is there already and is not a checkpoint"):
            save(tmp_path / name, n=1)
    save(tmp_path / "empty", n=1)
    save(tmp_path / "empty", n=2)
    assert load(tmp_path / "empty") == {"n": 2}
    assert _names(tmp_path) == ["empty", "file", "thesis"]


def test_leftovers_of_dead_saves_are_said_then_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(n={})
    left = [f".checkpoint-000002.staging-{'a' * 16}", f".checkpoint-000001.removed-{'0' * 16}"]
    others = [f".other.staging-{'a' * 16}", ".checkpoint-000002.staging-mine", ".git"]
    for name in left + others:
        (tmp_path / name / "inside").mkdir(parents=True)
    assert checkpoints.restore(n={}) is not None
    assert f"{left[0]} is an unfinished save; it is passed over" in caplog.text
    checkpoints.save(n={})
    assert _names(tmp_path) == sorted([*others, "checkpoint-000001", "checkpoint-000002"])
    save(tmp_path / "other", n=1)
    assert others[0] not in _names(tmp_path)


def test_a_checkpoint_caught_while_being_replaced_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(extra={"n": 1})
    path.rename(tmp_path / f".{path.name}.replaced-{'a' * 16}")
    extra = {"n": 0}
    assert checkpoints.restore(extra=extra) is not None
    assert extra == {"n": 1}
    assert load(path) == {"extra": {"n": 1}}
    assert checkpoints.save(extra={"n": 2}).name == "checkpoint-000002"
    assert _names(tmp_path) == ["checkpoint-000001", "checkpoint-000002"]


# -- damage ---------------------------------------------------------------------------------------


def _two(tmp_path: Path) -> tuple[Checkpointer, Path]:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(extra={"n": 1, "t": torch.ones(5)})
    return checkpoints, checkpoints.save(extra={"n": 2, "t": torch.ones(40)})


def _expect_passed_over(checkpoints: Checkpointer, path: Path, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    extra: dict[str, Any] = {}
    assert checkpoints.restore(extra=extra) == path.with_name("checkpoint-000001")
    assert extra["n"] == 1
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(path, extra={})
    assert f"{path} is passed over: " in caplog.text
    return caplog.text


@pytest.mark.parametrize("name", ["manifest.json", "part-00000.safetensors"])
def test_a_flipped_bit_anywhere_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    checkpoints, path = _two(tmp_path)
    data = (path / name).read_bytes()
    for place in [*range(0, len(data), 23), len(data) - 1]:
        altered = bytearray(data)
        altered[place] ^= 1 << place % 8
        (path / name).write_bytes(altered)
        assert name in _expect_passed_over(checkpoints, path, caplog)
    (path / name).write_bytes(data)
    assert Checkpointer(tmp_path).restore(extra={}) == path


@pytest.mark.parametrize("name", ["manifest.json", "part-00000.safetensors"])
def test_a_truncated_file_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    checkpoints, path = _two(tmp_path)
    data = (path / name).read_bytes()
    for length in (0, 1, 8, 60, len(data) // 2, len(data) - 1):
        (path / name).write_bytes(data[:length])
        said = _expect_passed_over(checkpoints, path, caplog)
        assert name in said
        if name != "manifest.json":
            assert f"{len(data)} bytes expected, {length} found" in said
    (path / name).unlink()
    assert f"{name} is missing" in _expect_passed_over(checkpoints, path, caplog)


def test_with_nothing_good_left_it_starts_fresh_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints, path = _two(tmp_path)
    for each in tmp_path.iterdir():
        (each / "manifest.json").unlink()
    extra = {"n": 0}
    assert checkpoints.restore(extra=extra) is None
    assert extra == {"n": 0}
    assert checkpoints.latest() is None
    assert "holds no good checkpoint" in caplog.text
    assert checkpoints.save(extra=extra).name == "checkpoint-000003"
    assert path.exists()


# -- disks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_an_error_and_leaves_the_last_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    checkpoints = Checkpointer(tmp_path, asynchronous=asynchronous)
    checkpoints.save(extra={"t": torch.ones(10)})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # To the writing process the limit is a disk that takes so much and no more.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"could not be saved: File too large") as caught:  # noqa: PT012 - the error comes with either
            checkpoints.save(extra={"t": torch.ones(100_000)})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "free 4000" in str(caught.value)
    assert "checkpoint-000002" in str(caught.value)
    assert _names(tmp_path) == ["checkpoint-000001"]
    extra: dict[str, Any] = {}
    assert checkpoints.restore(extra=extra) == tmp_path / "checkpoint-000001"
    checkpoints.save(extra=extra)
    checkpoints.close()
    assert _names(tmp_path) == ["checkpoint-000001", "checkpoint-000002"]


def _mount(path: Path, options: str) -> bool:
    """Mount a memory disk where this user and machine may; return whether it is there."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "rankwise-test", str(path)]
    return (
        shutil.which("mount") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB where one can be mounted, else a folder for which the process has a limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    disk = tmp_path / "disk"
    mounted = _mount(disk, "size=1m")
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    yield disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if mounted:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_keeps_the_last_checkpoint_and_takes_smaller_ones(
    small_disk: Path,
) -> None:
    checkpoints = Checkpointer(small_disk)
    checkpoints.save(extra={"n": 1, "t": torch.ones(1000)})
    for size in (2**18 - 60, 2**18, 2**20):
        with pytest.raises(CheckpointError, match=r"No space left on device|File too large") as caught:
            checkpoints.save(extra={"n": 2, "t": torch.ones(size)})
        assert "free " in str(caught.value)
        assert _names(small_disk) == ["checkpoint-000001"]
    extra: dict[str, Any] = {}
    assert checkpoints.restore(extra=extra) is not None
    assert extra["n"] == 1
    assert checkpoints.save(extra={"n": 2}).name == "checkpoint-000002"


def test_a_disk_that_turns_read_only_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    mounted = _mount(disk, "size=1m")
    checkpoints = Checkpointer(disk)
    checkpoints.save(extra={"n": 1})
    if mounted:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    else:
        disk.chmod(0o555)
    try:
        with pytest.raises(CheckpointError, match=r"Read-only file system|Permission denied") as caught:
            checkpoints.save(extra={"n": 2})
        assert "name a folder that this user can write to" in str(caught.value)
        extra: dict[str, Any] = {}
        assert checkpoints.restore(extra=extra) == disk / "checkpoint-000001"
        assert extra == {"n": 1}
    finally:
        disk.chmod(0o755) if not mounted else subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="could not be saved: Not a directory"):
        Checkpointer(tmp_path / "file" / "run").save(n=1)
    # Not even root can make directories there.
    with pytest.raises(CheckpointError, match="could not be saved"):
        Checkpointer("/proc/rankwise").save(n=1)


def test_a_failing_rename_brings_the_old_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", n=1)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if "staging" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path / "c", n=2)
    assert load(tmp_path / "c") == {"n": 1}
    assert _names(tmp_path) == ["c"]


# -- in the background ----------------------------------------------------------------------------


class Gate:
    """Holds the save in the background before it writes tensors, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        write = saving.STAGES["writing the tensors of"]

        def gated(job: saving.Job) -> Any:
            self.reached.set()
            self.opened.wait()
            return write(job)

        monkeypatch.setitem(saving.STAGES, "writing the tensors of", gated)


def test_objects_may_change_once_save_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    checkpoints = Checkpointer(tmp_path, asynchronous=True)
    tensor, extra = torch.ones(1000), {"n": [1]}
    path = checkpoints.save(tensor=tensor, extra=extra)
    assert gate.reached.wait(30)
    assert not path.exists()
    assert checkpoints.latest() is None
    tensor.zero_()
    extra["n"][0] = 2
    gate.opened.set()
    checkpoints.wait()
    back = load(path)
    assert back["tensor"].sum() == 1000
    assert back["extra"] == {"n": [1]}


def test_a_second_save_waits_for_the_first_and_reuses_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    copy_into = files.copy_into

    def noting(memory: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        taken.append(memory.data_ptr())
        copy_into(memory, tensors)

    monkeypatch.setattr(files, "copy_into", noting)
    with Checkpointer(tmp_path, keep=None, asynchronous=True) as checkpoints:
        for number in range(10):
            checkpoints.save(t=torch.full((1000,), float(number)))
            # All that came before is complete by now.
            assert len([path for path in tmp_path.iterdir() if path.name[0] == "c"]) >= number
    assert len(set(taken)) == 1
    for number in range(10):
        assert load(tmp_path / folder.checkpoint_name(number + 1))["t"][0] == number


@pytest.mark.parametrize("how", ["save", "wait", "close", "restore", "leave"])
def test_an_error_in_the_background_is_raised_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def break_(job: saving.Job) -> None:
        raise OSError(28, "No space left on device")

    checkpoints = Checkpointer(tmp_path, asynchronous=True)
    with monkeypatch.context() as patch:
        patch.setitem(saving.STAGES, "committing", break_)
        checkpoints.save(n={})
        with pytest.raises(CheckpointError, match="No space left on device"):
            leave() if how == "leave" else getattr(checkpoints, how)(
                **({"n": {}} if how in ("save", "restore") else {})
            )
    if how == "leave":
        join(device="cpu")
    assert checkpoints.restore(n={}) is None
    checkpoints.save(n={})
    checkpoints.close()
    assert _names(tmp_path) == ["checkpoint-000001"]


def test_leaving_the_world_completes_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    Checkpointer(tmp_path, asynchronous=True).save(n={"a": torch.ones(1000)})
    assert gate.reached.wait(30)
    threading.Timer(0.2, gate.opened.set).start()
    leave()
    assert load(tmp_path / "checkpoint-000001")["n"]["a"].sum() == 1000


def test_no_thread_is_left(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, asynchronous=True) as checkpoints:
        checkpoints.save(n={})
    assert [thread.name for thread in threading.enumerate() if "checkpoint" in thread.name] == []


def test_the_manifest_says_who_wrote_it(tmp_path: Path) -> None:
    path = save(tmp_path / "c", model=_model(), n=1)
    saved = manifest.decode((path / "manifest.json").read_bytes())
    assert saved.torch_version == torch.__version__
    assert saved.world_size == 1
    assert {name: entry.kind for name, entry in saved.objects.items()} == {
        "model": "torch.nn.modules.container.Sequential",
        "n": "builtins.int",
    }
