# SPDX-License-Identifier: Apache-2.0
"""What cannot be placed is refused, and nothing is changed."""

from __future__ import annotations

import copy
import resource
from typing import TYPE_CHECKING, Any

import pytest
from placed_models import assert_unchanged, net, tower
from torch import nn

from rankwise.errors import ConfigurationError
from rankwise.place.place import place, placement

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_thread")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown name": ({"plan": {"": "cpu", "block.1": "disk"}}, r"names 'block\.1'.*\n.*near it: blocks\.1"),
    "a split block": (
        {"plan": {"": "cpu", "blocks.1.up": "disk"}},
        r"splits blocks\.1, which must remain whole: Block is one of the blocks of blocks",
    ),
    "a split layer": ({"plan": {"": "cpu", "head.bias": "disk"}}, "splits head, .*: Linear is a single layer"),
    "not covered": ({"plan": {"blocks": "cpu"}}, r"not cover \d+ parameters(.*\n)+.*shift"),
    "no such device": ({"plan": {"": "cuda:9"}}, "Unknown device 'cuda:9'"),
    "no plan": ({"plan": 3}, "plan= is a int"),
    "a number for a name": ({"plan": {0: "cpu"}}, "names 0, but Net has no such module"),
    "two names, two devices": (
        {"plan": {"": "cpu", "blocks.2": "cpu", "again": "disk"}},
        r"gives blocks\.2\.\S+ 2 devices, by 2 names of its module.*\n(.*\n)*.*'again': 'disk'",
    ),
    "values thrown away": (
        {"plan": {"": "cpu", "head": "meta", "lstm": "meta"}},
        r"discard the values of 5 tensors",
    ),
    "another accelerator": ({"plan": {"": "xpu:0"}}, "Unknown device 'xpu:0'"),
    "an accelerator of a laptop": ({"budgets": {"mps": "1GB"}}, "Unknown device 'mps'"),
    "budgets in a list": ({"budgets": ["cpu"]}, "budgets= is a list"),
    "a folder that is a number": ({"offload_folder": 3}, "offload_folder must be a path, got 3"),
    "files that are a number": ({"checkpoint": 3}, "checkpoint must be a path, got 3"),
    "no policy": ({"plan": "balance"}, r"Unknown policy 'balance'(.*\n)+.*balanced"),
    "no devices": ({"plan": "auto", "budgets": {}, "offload_folder": None}, "no device with free memory"),
    "no amount": ({"budgets": {"cpu": "much"}}, "not an amount of memory"),
    "too large a layer": ({"budgets": {"cpu": 2000}}, "more than any budget allows"),
    "too large a model": (
        {"budgets": {"cpu": 6000}, "offload_folder": None},
        r"more than the memory of all devices(.*\n)+.*offload_folder",
    ),
    "over a budget by hand": ({"plan": {"": "cpu"}, "budgets": {"cpu": 4000}}, "puts more on cpu"),
    "offload_folder was not given": ({"plan": {"": "disk"}, "offload_folder": None}, "offload_folder was not given"),
    "keep_whole": ({"keep_whole": ["blocks.7"]}, r"no module named 'blocks\.7'"),
    "keep_whole of one name": ({"keep_whole": "blocks.7"}, r"no module named 'blocks\.7'"),
    "no files": ({"checkpoint": "/nowhere"}, "/nowhere does not exist"),
    "int8 of float64": ({"int8": True}, "int8=True requires a model in float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_changes_nothing(name: str, tmp_path: Path) -> None:
    options, message = REFUSED[name]
    model = net()
    model.again = model.blocks[2]
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigurationError, match=message):
        place(model, **{"offload_folder": tmp_path / "offload"} | options)
    assert_unchanged(model, state, tmp_path / "offload")


def test_placing_twice_and_what_is_not_placed() -> None:
    model = tower()
    with pytest.raises(ConfigurationError, match="that is not placed"):
        placement(model)
    place(model, {"": "cpu"})
    with pytest.raises(ConfigurationError, match="already called on this model"):
        place(nn.Sequential(model), {"": "cpu"})
    with pytest.raises(ConfigurationError, match="already called on this model"):
        place(model[0], {"": "cpu"})
    for what, words in ((3, "a int"), (nn.Linear, "the class Linear")):
        with pytest.raises(ConfigurationError, match=f"takes a torch.nn.Module, not {words}"):
            place(what)
    with pytest.raises(ConfigurationError, match="has no shape yet"):
        place(nn.Sequential(nn.LazyLinear(3)))


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(100, 100))
    state = copy.deepcopy(model.state_dict())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(ConfigurationError, match="has no room for 39"):
            place(model, {"": "disk"}, offload_folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_unchanged(model, state, tmp_path)
