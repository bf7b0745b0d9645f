# SPDX-License-Identifier: Apache-2.0
"""`replicate(place(model))`: ranks that each have several devices train as one rank with one device would."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from on_ranks import one_rank
from replicas import TOLERANCE, Net, Parameters, batches, built, largest_difference, part
from torch import nn

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError
from rankwise.place.place import place, placement

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

PLANS: tuple[dict[str, str], ...] = ({"": "disk"}, {"": "cpu", "second": "disk", "norm": "disk"})
SIZES = (7, 12, 4, 6)


def _train(world: World, places: bool) -> Parameters:
    model = built(lambda: Net(batchnorm=True))
    with tempfile.TemporaryDirectory() as folder:
        if places:
            place(model, PLANS[world.rank % 2], offload_folder=folder)
        rw.replicate(model, sync_batchnorm=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for x, y in batches(SIZES):
            first, second = [
                [part(part(t, index, 2), world.rank, world.world_size) for t in (x, y)] for index in range(2)
            ]
            with rw.no_sync(model):
                nn.functional.mse_loss(model(first[0]), first[1]).backward()
            nn.functional.mse_loss(model(second[0]), second[1]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if places:
            assert {row.device for row in placement(model).parts} == set(PLANS[world.rank % 2].values())
            assert len(list(Path(folder).iterdir())) == 1
        return {key: value.clone() for key, value in model.state_dict().items()}


def test_replicating_a_placed_model_is_exact(run_ranks: RunRanks) -> None:
    reference = one_rank(_train, False)
    for result in run_ranks(_train, 2, True):
        assert largest_difference(result.get(), reference) <= TOLERANCE


def _refused_alone(world: World) -> str:
    """A plan that only one rank's model cannot follow concerns only that rank: place does no communication."""
    replicated = rw.replicate(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="replicate\\(\\) was already called") as caught:
        place(replicated, {"": "cpu"})
    assert "rankwise.replicate(rankwise.place(model))" in str(caught.value)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    try:
        place(model, {"": "cpu", "2" if world.rank else "1": "cpu"})
    except ConfigurationError as error:
        return error.what
    return "placed"


def test_place_does_no_communication() -> None:
    values = [result.get() for result in testing.run_ranks(_refused_alone, 2)]
    assert values == ["placed", "The plan names '2', but Sequential has no such module."]
