# SPDX-License-Identifier: Apache-2.0
"""`shard`: whatever a loss is a mean or a sum over, N ranks compute what the plain script computes on one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
from loss_steps import STEPS, data, gradients, plain_model, step_of, train, two_steps_of
from losses import COUPLED, EXACT
from replicas import TOLERANCE, largest_difference, part
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError, PeerFailed

if TYPE_CHECKING:
    import torch
    from losses import Loss
    from replicas import Parameters

    from rankwise.world import World

OF_PARAMETERS = {"weight_decay", "weight_decay_and_sum", "penalties"}
"""Steps that compute with parameters, of which each rank has a part."""
OF_GRADIENTS = {"gradient_penalty", "some_inputs", "same_graph_twice"}
"""Steps that torch's fully_shard cannot take."""
SHARDED_STEPS = {name: step for name, step in STEPS.items() if name not in OF_PARAMETERS | OF_GRADIENTS}


def _on_ranks(world: World, sizes: dict[str, int]) -> dict[str, Parameters]:
    if sizes:
        rw.mesh(**sizes)
    one = {name: step_of(loss) for name, loss in EXACT.items()} | SHARDED_STEPS
    two = {f"two backwards of {name}": two_steps_of(loss) for name, loss in EXACT.items()}
    return {
        name: train(rw.shard(plain_model(), blocks=["0"]), step, world.rank, world.world_size)
        for name, step in (one | two).items()
    }


@pytest.mark.parametrize(
    ("world_size", "sizes"), [(1, {}), (2, {}), (3, {}), (4, {"dp_replicate": 2, "dp_shard": 2})]
)
def test_losses_are_exact(world_size: int, sizes: dict[str, int]) -> None:
    one = {name: train(plain_model(), step_of(loss), 0, 1) for name, loss in EXACT.items()}
    one |= {name: train(plain_model(), step, 0, 1) for name, step in SHARDED_STEPS.items()}
    two = {f"two backwards of {name}": train(plain_model(), two_steps_of(loss), 0, 1) for name, loss in EXACT.items()}
    plain = one | two
    for result in testing.run_ranks(_on_ranks, world_size, sizes):
        apart = {name: largest_difference(got, plain[name]) for name, got in result.get().items()}
        assert {name: value for name, value in apart.items() if value > TOLERANCE} == {}
