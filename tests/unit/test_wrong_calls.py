# SPDX-License-Identifier: Apache-2.0
"""Python's own errors about rankwise's names, attributes and arguments say what to write; those of others do not."""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING

import pytest

import rankwise
from rankwise.comm.session import annotate

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """
import torch
import rankwise as rw
world = rw.join(device="cpu")
model = torch.nn.Linear(3, 1)
loader = rw.DataLoader(torch.ones(4, 3), global_batch_size=2)
checkpoints = rw.Checkpointer("checkpoints")

class Run:
    def __init__(self):
        self.loader = loader
        self.sampler = None

def save(path):
    pass
"""
SET_EPOCH = "leave the line out: the loader counts its epochs; with shuffle=True each has another order"
AXES = "rw.mesh(worker_groups=..., dp_replicate=..., dp_shard=..., pp=..., tp=...)"
FIXES = {
    "rw.replicate(model, find_unused_parameters=True)": "leave it out: parameters that no rank or only some ranks use "
    "need no flag",
    "rw.replicate(model, device_ids=[0])": "leave it out, and move the model before: model.to(world.device)",
    "rw.save('ck', model)": "name each object: rw.save('ck', model=model)",
    "rw.save('ck', {'step': 1}, model=model)": "name each object: rw.save('ck', name=..., model=model)",
    "checkpoints.restore(model)": "name each object: checkpoints.restore(model=model)",
    "rw.mesh('dp_shard=2')": f"write {AXES}",
    "rw.mesh(\n    dp=2,\n)": f"did you mean dp_shard or dp_replicate? The call is {AXES}",
    "rw.mesh(stages=2)": f"the call is {AXES}",
    "rw.pipeline(model, torch.nn.MSELoss(), example=1, microbatches=4)": "did you mean micro_batches? The call is "
    "rw.pipeline(model, loss_fn, example=..., micro_batches=..., schedule=..., split=..., weight=...)",
    "rw.broadcast()": "write rw.broadcast(value, source, group=...)",
    "rw.Checkpointer('ck', keep_last=2)": "did you mean keep? The call is rw.Checkpointer(directory, keep=..., "
    "asynchronous=...)",
    "loader.set_epoch(1)": SET_EPOCH,
    "loader.sampler.set_epoch(1)": SET_EPOCH,
    "Run().loader.set_epoch(1)": SET_EPOCH,
    "loader.batches": "did you mean batch_size?",
    "world.size": "did you mean world_size or local_world_size?",
    "world.local": "did you mean local_rank or local_world_size?",
    "world.rank()": "write world.rank, without parentheses",
    "rw.save('ck', model=model); torch.load('ck')": "load a checkpoint of rankwise by rankwise.load('ck', model=model)",
}
OF_OTHERS = (
    "save('ck', model)",
    "model.set_epoch(1)",
    "Run().sampler.set_epoch(1)",
    "Run().sampler()",
    "len(loader, 1)",
    "torch.load('.')",
    "'a' + world.rank",
    "loader.batches = len(1)",
)


def raised(line: str, folder: Path) -> Exception:
    """Return what a script with this line raises, as the end of a rank annotates it."""
    script = folder / "train.py"
    script.write_text(f"{HEAD}{line}\n", encoding="utf-8")
    try:
        runpy.run_path(str(script))
    except (TypeError, AttributeError, OSError) as error:
        annotate(error)
        rankwise.leave()
        return error
    raise AssertionError(line)


@pytest.mark.parametrize(("line", "fix"), FIXES.items(), ids=str)
def test_the_error_says_what_to_write(line: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert raised(line, tmp_path).__notes__ == [f"  do        {fix}"]


@pytest.mark.parametrize("line", OF_OTHERS)
def test_errors_of_other_calls_remain_as_they_are(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not hasattr(raised(line, tmp_path), "__notes__")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("replcate", "did you mean rankwise.replicate?"),
        ("init", "write world = rankwise.join()"),
        ("DDP", "write rankwise.replicate(model)"),
        ("quux", "dir(rankwise) lists its names"),
    ],
)
def test_a_name_that_rankwise_lacks_is_answered_with_the_one_it_has(name: str, instead: str) -> None:
    assert not hasattr(rankwise, name)
    with pytest.raises(AttributeError) as asked:
        getattr(rankwise, name)
    assert str(asked.value) == f"module 'rankwise' has no attribute {name!r}: {instead}"
    with pytest.raises(ImportError) as imported:
        exec(f"from rankwise import {name}")  # noqa: S102 - the statement itself
    assert str(imported.value) == f"cannot import name {name!r} from 'rankwise': {instead}"


def test_an_object_that_answers_no_question_ends_with_its_own_error(tmp_path: Path) -> None:
    class Silent(TypeError):
        def __str__(self) -> str:
            raise ValueError

    error = Silent()
    annotate(error)
    assert not hasattr(error, "__notes__")
    assert type(raised("rw.mesh(object(), **{'dp': Run()})", tmp_path)) is TypeError


@pytest.mark.usefixtures("world_of_one")
def test_the_objects_have_no_more_attributes_than_before() -> None:
    loader = rankwise.DataLoader([1, 2], global_batch_size=2)
    assert not hasattr(loader, "set_epoch")
