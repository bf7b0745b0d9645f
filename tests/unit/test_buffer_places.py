# SPDX-License-Identifier: Apache-2.0
"""Where a model has buffers: looked for again only when that may have changed."""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from rankwise.replicate.buffers import BufferSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Counted(nn.Sequential):
    """A model that counts how often it is walked."""

    walks = 0

    def modules(self) -> Iterator[nn.Module]:
        self.walks += 1
        return super().modules()


def walks_after(model: Counted, places: BufferSlots, change: Callable[[], object]) -> int:
    """Return how often the model is walked after a change, and hold what is found against torch."""
    before = model.walks
    change()
    for _ in range(3):
        found, expected = list(places.buffers().values()), list(model.buffers())
        assert len(found) == len(expected)
        assert all(map(is_, found, expected))
    return model.walks - before


@pytest.mark.parametrize("layers", [[nn.Linear(2, 2)], [nn.InstanceNorm1d(2)], [nn.Linear(2, 2), nn.BatchNorm1d(2)]])
def test_a_model_that_stays_is_walked_once(layers: list[nn.Module]) -> None:
    model = Counted(*layers)
    places = BufferSlots(model)
    assert model.walks == 1
    assert walks_after(model, places, lambda: None) == 0


def test_a_replaced_or_removed_buffer_is_noticed_without_walking_the_modules() -> None:
    norm = nn.BatchNorm1d(2)
    model = Counted(norm)
    places = BufferSlots(model)
    assert walks_after(model, places, lambda: setattr(norm, "running_mean", torch.ones(2))) == 0
    assert walks_after(model, places, lambda: setattr(norm, "running_mean", None)) == 0
    assert walks_after(model, places, lambda: delattr(norm, "running_var")) == 0
    assert walks_after(model, places, nn.CrossEntropyLoss) == 0, "a weight of None is no buffer"


def test_a_buffer_or_layer_more_or_less_is_one_walk() -> None:
    norm = nn.BatchNorm1d(2)
    model, spare = Counted(norm), nn.BatchNorm1d(2)
    places = BufferSlots(model)
    assert walks_after(model, places, lambda: norm.register_buffer("late", torch.ones(2))) == 1
    assert walks_after(model, places, lambda: model.append(nn.ReLU())) == 1
    assert walks_after(model, places, lambda: model.insert(0, spare)) == 1
    assert walks_after(model, places, lambda: model.pop(0)) == 1


def test_scripted_layers_are_followed() -> None:
    # A FutureWarning from torch 2.15 on.
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):
        scripted = torch.jit.script(nn.BatchNorm1d(2))
    model = Counted(nn.Linear(2, 2), scripted)
    places = BufferSlots(model)
    assert walks_after(model, places, lambda: setattr(scripted, "running_mean", torch.ones(2))) == 0
    assert walks_after(model, places, lambda: model.pop(1)) == 1
