# SPDX-License-Identifier: Apache-2.0
"""Saving in the background: what may change meanwhile, and when its errors are raised."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from listing import names

from rankwise.checkpoint import files, folder
from rankwise.checkpoint import save as saving
from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.load import load
from rankwise.comm.join import join
from rankwise.comm.leave import leave
from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("world_of_one")


class Gate:
    """Holds the background save before it writes tensors, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        write = saving.STAGES["writing the tensors of"]

        def gated(job: saving.SaveJob) -> Any:
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
    def break_(*_: object) -> None:
        raise OSError(28, "No space left on device")

    checkpoints = Checkpointer(tmp_path, asynchronous=True)
    with monkeypatch.context() as patch:
        patch.setattr(folder, "commit", break_)
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
    assert names(tmp_path) == ["checkpoint-000001"]


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
