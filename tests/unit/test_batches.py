# SPDX-License-Identifier: Apache-2.0
"""Batches as trees of tensors: mapping them, and making one without samples."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import torch
from torch.utils.data import default_collate

from rankwise.data.batches import map_tensors, move, without_samples

Pair = namedtuple("Pair", "x y")  # noqa: PYI024 - what users' datasets return


def empty(sample: Any, collate: Any = default_collate) -> Any:
    return without_samples(collate([sample]), collate([sample, sample]))


def test_maps_every_container() -> None:
    tree = [
        torch.ones(1),
        (torch.ones(1), "a"),
        {"k": Pair(torch.ones(1), 3)},
        OrderedDict(o=torch.ones(1)),
    ]
    doubled = map_tensors(lambda tensor: tensor * 2, tree)
    assert [type(part) for part in doubled] == [torch.Tensor, tuple, dict, OrderedDict]
    assert doubled[1][1] == "a"
    assert doubled[2]["k"] == Pair(torch.tensor([2.0]), 3)
    assert float(doubled[0] + doubled[1][0] + doubled[3]["o"]) == 6


def test_an_object_that_can_move_itself_does() -> None:
    class Graph:
        def to(self, device: torch.device) -> str:
            return f"on {device}"

    assert move(Graph(), torch.device("meta")) == "on meta"
    moved = move({"x": [torch.ones(2)]}, torch.device("meta"))
    assert moved["x"][0].device.type == "meta"
    assert move(3, torch.device("meta")) == 3


def test_a_batch_without_samples_keeps_shapes_and_types() -> None:
    batch = empty(
        {
            "x": torch.zeros(2, 3, dtype=torch.float16),
            "y": 4,
            "name": "n",
            "pair": Pair(1.5, [torch.ones(2)]),
        }
    )
    assert batch["x"].shape == (0, 2, 3)
    assert batch["x"].dtype == torch.float16
    assert batch["y"].shape == (0,)
    assert batch["y"].dtype == torch.int64
    assert batch["name"] == []
    assert type(batch["pair"]) is Pair
    assert batch["pair"].x.dtype == torch.float64
    assert batch["pair"].y[0].shape == (0, 2)


def test_a_batch_without_samples_finds_where_samples_are_counted() -> None:
    def time_first(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples, dim=1)

    def as_lists(samples: list[Any]) -> tuple[list[Any], list[Any]]:
        return [sample[0] for sample in samples], [sample[1] for sample in samples]

    assert empty(torch.zeros(5, 7), time_first).shape == (5, 0, 7)
    assert empty((torch.zeros(3), {"boxes": torch.zeros(2, 4)}), as_lists) == ([], [])
    constant = torch.eye(2)
    kept = empty(torch.zeros(3), lambda samples: (torch.stack(samples), constant))
    assert kept[0].shape == (0, 3)
    assert kept[1] is constant
