# SPDX-License-Identifier: Apache-2.0
"""Every way of spreading a model, and their combinations: the gradients and the parameters of one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from replicas import TOLERANCE, largest_difference
from spread_training import PLAN, WAYS, Net, train
from torch import nn

import rankwise as rw
from rankwise.errors import ConfigurationError
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from spread_training import Found

    from rankwise.world.facts import World


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(train, 1, "replicate", {}, str(tmp_path_factory.mktemp("none")))[0].get()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("strategy", "sizes"), WAYS, ids=[f"{way} {sizes}" for way, sizes in WAYS])
def test_a_distributed_model_trains_as_on_one_device(
    tmp_path_factory: pytest.TempPathFactory, one_device: Found, strategy: str, sizes: dict[str, int]
) -> None:
    world_size = torch.Size(sizes.values()).numel()
    folder = str(tmp_path_factory.mktemp("offloaded"))
    results = [result.get() for result in run_ranks(train, world_size, strategy, sizes, folder)]
    for kind, expected in enumerate(one_device):
        assert set().union(*(result[kind] for result in results)) == expected.keys()
        for result in results:
            found = result[kind]
            assert largest_difference(found, {name: expected[name] for name in found}) < TOLERANCE


def _spread(model: nn.Module, strategy: str, folder: str) -> None:
    if strategy == "pipeline":
        example = torch.zeros(2, 5, dtype=torch.float64)
        rw.pipeline(model, nn.functional.mse_loss, example=example)
    elif strategy == "place":
        rw.place(model, {"": "cpu", "blocks.1": "disk"}, offload_folder=folder)
    elif strategy == "tensor_parallel":
        rw.tensor_parallel(model, PLAN)
    else:
        getattr(rw, strategy)(model)


def _one_after_the_other(_world: World, first: str, second: str, folder: str) -> str:
    model = Net().double()
    _spread(model, first, folder)
    try:
        _spread(model, second, folder)
    except ConfigurationError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize(
    ("first", "second", "instead"),
    [
        ("replicate", "replicate", "replicate() once per model"),
        ("replicate", "shard", "only shard(), after rankwise.mesh(dp_replicate=..., dp_shard=...)"),
        ("shard", "replicate", "only shard(), after rankwise.mesh(dp_replicate=..., dp_shard=...)"),
        ("replicate", "pipeline", "only pipeline(), after rankwise.mesh(pp=..., dp_replicate=...)"),
        ("pipeline", "replicate", "only pipeline(), after rankwise.mesh(pp=..., dp_replicate=...)"),
        ("shard", "pipeline", "dp_replicate="),
        ("replicate", "tensor_parallel", "tensor_parallel() first, then replicate()"),
        ("shard", "tensor_parallel", "tensor_parallel() first, then shard()"),
        ("pipeline", "tensor_parallel", "tensor_parallel() first, then pipeline()"),
        ("replicate", "place", "rankwise.replicate(rankwise.place(model))"),
        ("place", "shard", "rankwise.replicate(model)"),
        ("place", "pipeline", "rankwise.replicate(model)"),
        ("place", "tensor_parallel", "rankwise.replicate(model)"),
    ],
)
def test_strategies_that_do_not_go_together_say_what_does(
    tmp_path_factory: pytest.TempPathFactory, first: str, second: str, instead: str
) -> None:
    folder = str(tmp_path_factory.mktemp("offloaded"))
    for result in run_ranks(_one_after_the_other, 2, first, second, folder):
        assert instead in result.get()


def _differing(world: World, case: str) -> str:
    model = Net().double()
    try:
        if case == "blocks":
            rw.shard(model, blocks=["blocks.*"] if world.rank else ["blocks.0"])
        elif case == "precision":
            rw.shard(model, mixed_precision="bf16" if world.rank else None)
        elif case == "plan":
            rw.tensor_parallel(model, PLAN if world.rank else {"blocks.0.up": "column", "blocks.0.down": "row"})
        elif case == "nobody averages":
            rw.mesh(dp_replicate=2, tp=2)
            rw.tensor_parallel(model, PLAN)
            model(torch.zeros(2, 5, dtype=torch.float64))
        elif case == "nobody splits":
            rw.mesh(dp_replicate=2, tp=2)
            rw.replicate(model)
    except ConfigurationError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("blocks", "the configuration of shard() differs between ranks"),
        ("precision", "the configuration of shard() differs between ranks"),
        ("plan", "the plan of tensor_parallel() differs between ranks"),
        ("nobody averages", "call rankwise.replicate(model) after tensor_parallel()"),
        ("nobody splits", "tensor_parallel(model) first"),
    ],
)
def test_calls_that_would_mix_values_are_refused_on_every_rank(case: str, words: str) -> None:
    for result in run_ranks(_differing, 4 if case.startswith("nobody") else 2, case):
        assert words in result.get()
