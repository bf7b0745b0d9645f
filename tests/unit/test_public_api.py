# SPDX-License-Identifier: Apache-2.0
"""The public names, word for word: adding or losing one is a decision, not an accident."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys

import pytest

import rankwise

PUBLIC = [
    "Checkpointer",
    "DataLoader",
    "DiLoCo",
    "PowerSGD",
    "ShardedSampler",
    "TopK",
    "World",
    "all_gather",
    "all_gather_object",
    "all_gather_uneven",
    "all_ranks_succeed",
    "all_reduce",
    "all_to_all",
    "as_one_rank",
    "barrier",
    "broadcast",
    "broadcast_object",
    "independent",
    "join",
    "launch",
    "launcher",
    "leave",
    "load",
    "load_weights",
    "local_rank_zero_first",
    "local_sgd",
    "log",
    "log_value",
    "mean",
    "mesh",
    "new_group",
    "no_sync",
    "parameter_server",
    "pipeline",
    "place",
    "placement",
    "plan_of",
    "print",
    "progress",
    "recv",
    "reduce_scatter",
    "replicate",
    "save",
    "save_weights",
    "send",
    "shard",
    "share",
    "tensor_parallel",
    "weight",
    "whole_batch",
]


def test_the_public_names() -> None:
    assert sorted(rankwise.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_explains_itself(name: str) -> None:
    thing = getattr(rankwise, name)
    assert inspect.getdoc(thing)
    assert thing.__module__.startswith("rankwise."), f"{name} is somebody else's"


@pytest.mark.parametrize("name", [name for name in PUBLIC if name[0].isupper()])
def test_every_public_method_explains_itself(name: str) -> None:
    kind = getattr(rankwise, name)
    methods = [key for key, value in vars(kind).items() if callable(value) and not key.startswith("_")]
    assert [method for method in methods if not inspect.getdoc(getattr(kind, method))] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_every_parameter_of_a_public_name_has_a_type(name: str) -> None:
    thing = getattr(rankwise, name)
    parameters = inspect.signature(thing).parameters.values()
    assert [one.name for one in parameters if one.annotation is inspect.Parameter.empty] == []


def test_no_public_function_takes_a_bare_batch_size() -> None:
    """One word for two quantities is how other libraries went wrong."""
    taking = [name for name in PUBLIC if "batch_size" in inspect.signature(getattr(rankwise, name)).parameters]
    assert taking == []


def test_the_star_brings_the_public_names_only() -> None:
    scope: dict[str, object] = {}
    exec("from rankwise import *", scope)  # noqa: S102 - the statement is the subject
    assert sorted(set(scope) - {"__builtins__"}) == PUBLIC


def test_a_module_does_not_hide_the_public_name_it_shares() -> None:
    program = (
        "import rankwise.launch.start, rankwise.log, rankwise.progress, rankwise as rw; from rankwise import launch; "
        "print(callable(rw.launch), launch is rw.launch, callable(rw.log), callable(rw.progress))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "True True True True\n"


def test_the_package_can_be_named_in_a_pickled_function() -> None:
    """A pickler by value knows plain modules only; other kinds have to say themselves how they are pickled."""
    import cloudpickle

    assert pickle.loads(cloudpickle.dumps(rankwise)) is rankwise  # noqa: S301 - our own


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="replicate"):
        _ = rankwise.DistributedDataParallel


def test_importing_the_package_alone_does_not_import_torch() -> None:
    program = "import sys, rankwise; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"
