# SPDX-License-Identifier: Apache-2.0
"""``torch.jit.trace`` of a replicated model, on which TensorBoard's ``add_graph`` is built, and ``torch.export``."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from rankwise.world.facts import World


def _trained(_: World, traces: bool) -> list[float]:
    torch.manual_seed(0)
    model = rw.replicate(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.4), nn.Linear(4, 1)).double())
    x = torch.randn(5, 3, dtype=torch.float64)
    data = torch.randn(16, 3, dtype=torch.float64)
    if traces:
        torch.jit.trace(model, x, check_trace=False)
        model.eval()
        graphs: list[Any] = [torch.jit.trace(model, x), torch.jit.script(copy.deepcopy(model))]
        for traced in graphs:
            torch.testing.assert_close(traced(x), copy.deepcopy(model)(x), rtol=0, atol=0)
        # While torch runs the model to export it, it says that it compiles.
        with torch.no_grad():
            exported = torch.export.export(model, (x,)).module()
            torch.testing.assert_close(exported(x), model(x), rtol=0, atol=1e-12)
        model.train()
    torch.manual_seed(1)
    for batch in rw.DataLoader(data, global_batch_size=8):
        model(batch).square().mean().backward()
    return [value for one in model.parameters() for value in one.grad.flatten().tolist()]  # type: ignore[union-attr]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_traced_model_computes_the_same_and_the_model_trains_on(world_size: int) -> None:
    (expected,) = testing.run_ranks(_trained, 1, False)
    for result in testing.run_ranks(_trained, world_size, True):
        torch.testing.assert_close(torch.tensor(result.get()), torch.tensor(expected.get()), rtol=0, atol=1e-6)
