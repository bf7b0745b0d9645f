# SPDX-License-Identifier: Apache-2.0
"""Files that an earlier rankwise wrote: one process reads each bitwise.

``tests/kept/make.py`` says how they were written. Where one of these tests fails, users' files no longer load.
"""

from __future__ import annotations

import json
import pickle
import pickletools
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kept_arrangements import ARRANGEMENTS
from kept_files import assert_close, assert_same_bits, below, expected, told
from kept_models import FEATURES, NUM_SAMPLES, net, numbers, same_values, tensors_of, tied
from kept_pickles import values_by_class
from kept_surroundings import plain_values

import rankwise as rw
from rankwise.checkpoint import folder_lock

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

PICKLED = ("place", "replicate", "sync_batchnorm", "compress", "horovod", "local_sgd")
OWN_LAYER = {"horovod": {"rankwise.compat.horovod.sync_batch_norm SyncBatchNorm"}}
"""Names of rankwise in a pickle: only of a layer that the user has put into the model."""


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_one_process_reads_the_checkpoint_of_any_arrangement(kept: Path, name: str) -> None:
    state = rw.load(kept / name / "checkpoint-000001")
    assert_same_bits(tensors_of(state), expected(kept, name, "saved"))


def test_a_checkpoint_by_save_is_read_as_trees(kept: Path) -> None:
    state = rw.load(kept / "surroundings-by-save")
    positions = told(kept, "surroundings")["positions"]
    extra = state.pop("extra")
    assert_same_bits(tensors_of({**state, "random": extra["random"]}), expected(kept, "surroundings", "saved"))
    assert json.loads(json.dumps({name: state[name] for name in positions})) == positions
    assert same_values(extra["plain"], plain_values())


def test_the_lock_of_a_job_that_was_killed_is_read(kept: Path) -> None:
    found = folder_lock.decode((kept / "lock").read_bytes())
    assert found is not None
    wanted = told(kept, "surroundings")["owner"]
    assert {key: getattr(found, key, None) for key in wanted.keys() - {"signs_of_life"}} == {
        key: value for key, value in wanted.items() if key != "signs_of_life"
    }


@pytest.mark.parametrize("name", ["weights", "tied"])
def test_weights_load_into_a_plain_model(kept: Path, name: str) -> None:
    model = net(0.7) if name == "weights" else tied(0.7)
    rw.load_weights(kept / f"{name}.safetensors", model)
    assert_same_bits(tensors_of(model.state_dict()), expected(kept, name, "saved"))


def classes_of_ours(file: Path) -> set[str]:
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        found = {str(argument) for code, argument, _ in pickletools.genops(archive.read(name)) if code.name == "GLOBAL"}
    return {one for one in found if one.startswith("rankwise")}


@pytest.mark.parametrize("kind", ["model", "copy"])
@pytest.mark.parametrize("name", PICKLED)
def test_a_pickled_model_is_unchanged(kept: Path, name: str, kind: str) -> None:
    file = kept / "pickles" / f"{name}-{kind}.pt"
    assert classes_of_ours(file) == OWN_LAYER.get(name, set())
    saved = expected(kept, f"pickle-{name}", "saved")
    model: nn.Module = torch.load(file, weights_only=False)
    assert_same_bits(tensors_of(model.state_dict()), below(saved, "model"))
    output = model.eval()(numbers(NUM_SAMPLES, FEATURES, start=5))
    assert_close({"output": output.detach()}, {"output": saved["output"]})
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", PICKLED)
def test_pickled_optimizers_and_schedulers_are_unchanged(kept: Path, name: str) -> None:
    held = below(expected(kept, f"pickle-{name}", "saved"), "optimizer")
    files = [kept / "pickles" / f"{name}-{kind}.pt" for kind in ("optimizer", "scheduler")]
    assert [classes_of_ours(file) for file in files] == [set(), set()]
    optimizer, scheduler = (torch.load(file, weights_only=False) for file in files)
    for one in (optimizer, scheduler.optimizer):
        assert_same_bits(tensors_of(one.state_dict()), held)
        one.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.01 / 8]


@pytest.mark.parametrize("name", values_by_class())
def test_a_pickled_option_or_error_is_unchanged(kept: Path, name: str) -> None:
    found: Any = pickle.loads((kept / "pickles" / f"{name}.pickle").read_bytes())  # noqa: S301 - our own
    wanted = values_by_class()[name]
    assert type(found) is type(wanted)
    assert str(found) == str(wanted)
    assert isinstance(wanted, Exception) or found == wanted
