# SPDX-License-Identifier: Apache-2.0
"""What rankwise.shard refuses: on all ranks, before anything changed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from replicas import built
from said import check_said
from sharded_models import Deep
from torch import nn

from rankwise import testing
from rankwise.errors import ConfigurationError, PeerFailed
from rankwise.replicate.device_mesh import mesh
from rankwise.replicate.replicate import replicate
from rankwise.shard.shard import shard
from rankwise.tensor_parallel.tensor_parallel import tensor_parallel

if TYPE_CHECKING:
    from rankwise.world.facts import World

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"blocks": nn.Linear}, "does not name blocks"),
    ({"blocks": 3.5}, "blocks=3.5 does not name blocks"),
    ({"blocks": {"layers.*": 1}}, "does not name blocks"),
    ({"blocks": "0"}, "blocks='0' does not name blocks"),
    ({"blocks": -5}, "blocks=-5 does not name blocks"),
    ({"blocks": [int]}, "does not name blocks"),
    ({"blocks": [nn.Linear, 3]}, "does not name blocks"),
    ({"mixed_precision": ["bf16"]}, "Unknown mixed_precision=['bf16']"),
    ({"recompute": None}, "recompute must not be None"),
    ({"weight": 3}, "weight of shard() must be callable, got 3"),
    ({"cpu_offload": "no"}, "cpu_offload='no'"),
]


def refusals(world: World) -> list[str]:
    said = []

    def refused(action: Any) -> None:
        try:
            action()
        except (ConfigurationError, PeerFailed) as error:
            said.append(str(error))

    refused(lambda: shard(built(Deep), blocks=["layer.*"]))
    refused(lambda: shard(built(Deep), blocks=[nn.Conv2d]))
    refused(lambda: shard(built(Deep), blocks="much"))
    refused(lambda: shard(built(Deep), mixed_precision="bf8"))
    for options, _ in WRONG:
        refused(lambda options=options: shard(built(Deep), **options))
    refused(lambda: shard(None))
    refused(lambda: shard(nn.Sequential(nn.LazyLinear(3))))
    refused(lambda: shard(nn.Embedding(3, 3, sparse=True)))
    mixed = built(Deep)
    mixed.layers[1].float()
    mixed.layers[1].up.double()
    refused(lambda: shard(mixed, blocks=["layers.*"]))
    with torch.device("meta" if world.rank else "cpu"):
        partly = Deep()
    refused(lambda: shard(partly))
    if world.rank == 1:
        refused(lambda: shard(built(Deep).requires_grad_(False)))
    else:
        refused(lambda: shard(built(Deep)))
    model = built(Deep)
    early = torch.optim.SGD(model.parameters(), 0.1)
    shard(model)
    refused(lambda: shard(model))
    refused(lambda: tensor_parallel(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(lambda: model(torch.zeros(1, 6).double()))
    del early
    return said


def test_impossible_arguments_are_refused_on_all_ranks_before_anything_changed() -> None:
    parts = [
        "blocks names 'layer.*', but the model has no such module",
        "blocks names the class Conv2d",
        "blocks='much' is not a size",
        "Unknown mixed_precision='bf8' of shard()",
        *(message for _, message in WRONG),
        "shard() takes a torch.nn.Module, not a NoneType",
        "Parameter 0.weight has no shape yet",
        "has a sparse gradient",
        "The block layers.1 holds parameters of 2 dtypes",
        "Different parts of the model are on the meta device",
        "The model has no parameter that needs a gradient",
        "shard() was already called on this model",
        "call tensor_parallel() first, then shard()",
        "An optimizer (SGD) was created before shard()",
    ]
    for result in testing.run_ranks(refusals, 2):
        check_said(result.get(), parts)


def wrong_axes(_: World, sizes: dict[str, int]) -> str:
    mesh(**sizes)
    try:
        shard(built(Deep))
    except (ConfigurationError, PeerFailed) as error:
        return str(error)
    return ""


def _other_strategies(_: World) -> list[str]:
    shard(built(Deep))
    said = []
    for wrong in (lambda: replicate(built(Deep)), lambda: mesh(dp_replicate=2)):
        with pytest.raises(ConfigurationError) as caught:
            wrong()
        said.append(str(caught.value))
    return said


def test_what_shard_has_laid_out_is_named_with_its_line() -> None:
    for result in testing.run_ranks(_other_strategies, 2):
        replicated, meshed = result.get()
        assert "rankwise.shard() at test_shard_refusals.py:" in replicated
        assert "laid the ranks out along dp_shard, so replicate() has none left." in replicated
        assert "call rankwise.shard() for this model too" in replicated
        assert "rankwise.shard() at test_shard_refusals.py:" in meshed


def test_a_mesh_that_sharding_does_not_use_is_refused_with_the_nearest() -> None:
    for result in testing.run_ranks(wrong_axes, 2, {"pp": 2}):
        assert "rankwise.mesh(dp_shard=2) and shard()" in result.get()
