# SPDX-License-Identifier: Apache-2.0
"""`replicate`: the model stays itself, and starts from rank zero's."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING

import torch
from replicas import Net, Parameters, built, largest_difference
from torch import nn

import rankwise as rw

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World


def _itself(world: World) -> None:
    plain = built(Net)
    keys, kind = list(plain.state_dict()), type(plain)
    model = rw.replicate(plain)
    assert model is plain
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert largest_difference(twin.state_dict(), model.state_dict()) == 0.0
        # A copy has no ranks: only this one calls it, and nobody waits.
        if world.rank == 0:
            twin(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    rw.barrier()


def test_the_model_stays_itself_and_its_copies_are_plain(run_ranks: RunRanks) -> None:
    for result in run_ranks(_itself, 2):
        result.get()


def _starts_equal(world: World) -> Parameters:
    torch.manual_seed(world.rank)
    model = rw.replicate(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), sync_batchnorm=True)
    return model.state_dict()


def test_every_rank_starts_from_rank_zero(run_ranks: RunRanks) -> None:
    results = [result.get() for result in run_ranks(_starts_equal, 3)]
    for result in results[1:]:
        assert largest_difference(result, results[0]) == 0.0
