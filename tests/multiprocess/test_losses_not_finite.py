# SPDX-License-Identifier: Apache-2.0
"""The first loss that is not finite: the rank that computed it names itself, the step and its samples, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from said import listening

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from rankwise.world.facts import World

BATCH = 8
AT = 13


def _trained(_: World, value: float) -> list[str]:
    model = rw.replicate(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(19, 2)
    data[AT, 0] = value
    with listening() as said:
        for _epoch in range(2):
            for x in rw.DataLoader(data, global_batch_size=BATCH):  # a rank has none of the last three samples
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    return [one for one in said if "the first one of any rank that is not finite" in one]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_rank_and_its_samples_are_named_once(value: float, world_size: int) -> None:
    said = [one.get() for one in testing.run_ranks(_trained, world_size, value)]
    share = BATCH // world_size
    culprit = (AT - BATCH) // share
    for rank, texts in enumerate(said):
        assert len(texts) == (rank == culprit and value != 1.0)
    for text in said[culprit]:
        first = culprit * share
        assert f"[rank {culprit}/{world_size}" in text
        assert f"is {value} in its samples {first} to {first + share - 1} of batch 1 of epoch 0" in text
        assert f"dataset[{', '.join(str(BATCH + first + number) for number in range(share))}]" in text


def _by_hand(world: World) -> list[str]:
    model = rw.replicate(torch.nn.Linear(2, 1))
    with listening() as said:
        for step in range(3):
            x = torch.full((4, 2), float("nan") if (step, world.rank) == (1, 1) else 1.0 + world.rank)
            model(x).square().mean().backward()
    return [one for one in said if "the first one of any rank that is not finite" in one]


def test_batches_of_no_loader_are_named_by_the_call() -> None:
    none, (text,) = (one.get() for one in testing.run_ranks(_by_hand, 2))
    assert none == []
    assert "is nan in backward() call 2," in text


def _masked(_: World) -> list[str]:
    model = rw.replicate(torch.nn.Linear(2, 3))
    target = torch.tensor([0, 1, 2, 1, -100, -100])
    with listening() as said:
        for x, y in rw.DataLoader((torch.ones(6, 2), target), global_batch_size=6):
            torch.nn.functional.cross_entropy(model(x), y).backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)
    return [one for one in said if "not finite" in one]


def test_the_mean_of_no_label_is_no_matter() -> None:
    assert [one.get() for one in testing.run_ranks(_masked, 3)] == [[], [], []]


def _in_stages(_: World, mesh: dict[str, int], value: float) -> list[str]:
    rw.mesh(**mesh)
    data = torch.ones(19, 2)
    data[AT, 0] = value
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(3)])
    step = rw.pipeline(model, lambda output, _: output.square().mean(), example=data[:8], micro_batches=2)
    with listening() as said:
        for _epoch in range(2):
            for x in rw.DataLoader(data, global_batch_size=BATCH):
                step(x, x)
    return [one for one in said if "the first one of any rank that is not finite" in one]


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "culprit", "first", "num"),
    [(2, {"pp": 2}, 1, 4, 4), (3, {"pp": 3}, 2, 4, 4), (4, {"pp": 2, "dp_replicate": 2}, 3, 4, 2)],
)
def test_the_micro_batch_of_a_pipeline_is_named_once(
    num_ranks: int, mesh: dict[str, int], culprit: int, first: int, num: int
) -> None:
    for rank, one in enumerate(testing.run_ranks(_in_stages, num_ranks, mesh, float("nan"))):
        texts = one.get()
        assert len(texts) == (rank == culprit), (rank, texts)
        for text in texts:
            assert f"is nan in its samples {first} to {first + num - 1} of batch 1 of epoch 0" in text
            assert f"dataset[{', '.join(str(BATCH + first + number) for number in range(num))}]" in text
            assert "skip such a step on every rank of the pipeline" in text
    assert [one.get() for one in testing.run_ranks(_in_stages, num_ranks, mesh, 1.0)] == [[]] * num_ranks
