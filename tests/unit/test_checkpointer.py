# SPDX-License-Identifier: Apache-2.0
"""Saving and restoring on one rank: everything comes back, and never half loaded."""

from __future__ import annotations

import copy
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from listing import names
from safetensors.torch import save_file

from rankwise.checkpoint import manifest
from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.load import load
from rankwise.checkpoint.save import save
from rankwise.comm.leave import leave
from rankwise.errors import CheckpointError, ConfigurationError, NotJoined

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("world_of_one")


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
    assert names(path) == ["manifest.json", "part-00000.safetensors"]


def test_training_resumes_as_if_never_stopped(tmp_path: Path) -> None:
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


def test_the_manifest_names_the_version_that_wrote_it(tmp_path: Path) -> None:
    path = save(tmp_path / "c", model=_model(), n=1)
    saved = manifest.decode((path / "manifest.json").read_bytes())
    assert saved.torch_version == torch.__version__
    assert saved.world_size == 1
    assert {name: entry.kind for name, entry in saved.objects.items()} == {
        "model": "torch.nn.modules.container.Sequential",
        "n": "builtins.int",
    }


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
        with pytest.raises(CheckpointError, match=f"the first difference is at {key}") as caught:
            attempt(a=a, loader=loader, model=other)
        assert evidence in str(caught.value)
    assert _equal((other.state_dict(), a.state_dict())[0], before[0])
    assert _equal(a.state_dict(), before[1])
    assert loader.at == 1


def test_another_optimizer_s_checkpoint_is_refused(tmp_path: Path) -> None:
    model, optimizer = _trained()
    path = save(tmp_path / "c", optimizer=optimizer)
    parameters = list(model.parameters())
    with pytest.raises(CheckpointError, match=r"(?s)first difference is at optimizer.*checkpoint: dict.*here: list"):
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
    with pytest.raises(CheckpointError, match=r"loader rejected its state .*KeyError: 3"):
        load(tmp_path / "c", model=model, loader=Refusing())
    assert _equal(model.state_dict(), before)


def test_a_file_that_is_no_checkpoint_is_named_with_what_loads_it(tmp_path: Path) -> None:
    model = _model()
    old = tmp_path / "old.pt"
    torch.save(model.state_dict(), old)
    with pytest.raises(CheckpointError, match=r"old\.pt cannot be loaded: it is a file of torch\.save\(\)") as caught:
        load(old, model=model)
    assert caught.value.do == "model.load_state_dict(torch.load('old.pt')), before rankwise.replicate(model)"
    weights = tmp_path / "old.safetensors"
    save_file(model.state_dict(), weights)
    with pytest.raises(CheckpointError, match="it is a file of safetensors") as caught:
        load(weights, model=model)
    assert caught.value.do == "rankwise.load_weights('old.safetensors', model)"


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    for keep in (0, -1, True, 1.5):
        with pytest.raises(ConfigurationError, match="keep must be a positive integer or None"):
            Checkpointer(tmp_path, keep=keep)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"of Checkpointer\(\) must be the path of a folder, got a NoneType"):
        Checkpointer(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"of load\(\) must be the path of a folder, got a Linear"):
        load(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"of save\(\) must be the path of a folder, got a int"):
        save(3, model=_model())  # type: ignore[arg-type]
    checkpoints = Checkpointer(tmp_path)
    for step in (-1, True, "3"):
        with pytest.raises(ConfigurationError, match="step must be a non-negative integer"):
            checkpoints.save(step=step, model=_model())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"save\(\) was called without objects"):
        checkpoints.save()
    with pytest.raises(ConfigurationError, match=r"restore\(\) was called without objects"):
        checkpoints.restore()
    with pytest.raises(ConfigurationError, match="cannot be restored in place"):
        checkpoints.restore(number=3)
    with pytest.raises(CheckpointError, match=r"extra\.when\[0\] cannot be saved: it is a builtins.set"):
        checkpoints.save(extra={"when": [{1}]})
    assert names(tmp_path) == []
