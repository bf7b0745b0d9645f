# SPDX-License-Identifier: Apache-2.0
"""Every way of spreading a model, and their combinations: the gradients and the parameters of one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from replicas import TOLERANCE, largest_difference
from spread_training import WAYS, train

from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from spread_training import Found


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(train, 1, "replicate", {}, str(tmp_path_factory.mktemp("none")))[0].get()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("strategy", "sizes"), WAYS, ids=[f"{way} {sizes}" for way, sizes in WAYS])
def test_what_is_spread_trains_as_on_one_device(
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
