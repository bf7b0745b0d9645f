# SPDX-License-Identifier: Apache-2.0
"""What of a sample is compared, and which differences are rounding."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from rankwise.data.fingerprints import Leaf, describe_block, leaves_of, listings_of, unlike


def only(value: Any) -> Leaf:
    (leaf,) = leaves_of(value)
    return leaf


IMAGE = (np.arange(3 * 40 * 40) * 7919 % 256).astype(np.uint8).reshape(40, 40, 3)
FLOATS = torch.from_numpy(IMAGE.astype(np.float32)) / 255


@dataclass
class Scan:
    voxels: torch.Tensor
    name: str


def test_every_value_is_found_by_its_place() -> None:
    sample = {"a": [torch.zeros(2), "x"], "b": (None, Scan(torch.ones(1, 1), "/data/1.nii"))}
    assert [(leaf.path, leaf.kind, leaf.shown) for leaf in leaves_of(sample)] == [
        ("['a'].length", "length", "list of 2"),
        ("['a'][0]", "float32[2]", "float32[2] 0, 0"),
        ("['a'][1]", "text", "'x'"),
        ("['b'].length", "length", "tuple of 2"),
        ("['b'][0]", "NoneType", "None"),
        ("['b'][1].voxels", "float32[1, 1]", "float32[1, 1] 1"),
        ("['b'][1].name", "text", "'1.nii'"),
    ]


def test_leaves_travel_as_json() -> None:
    sample = (np.float32("nan"), torch.tensor([1e300, -np.inf], dtype=torch.float64), "\udcff", 2**70)
    loaded = json.loads(json.dumps(leaves_of(sample)))
    assert [repr(Leaf(*fields)) for fields in loaded] == [repr(leaf) for leaf in leaves_of(sample)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, 1.0),
        ("a", "b"),
        (torch.tensor(3), torch.tensor(4)),
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), torch.zeros(3).double()),
        (torch.zeros(3), torch.full((3,), float("nan"))),
        (FLOATS, FLOATS.flip(0)),
        (FLOATS, FLOATS + torch.randn(FLOATS.shape, generator=torch.Generator().manual_seed(0))),
        (IMAGE, IMAGE[::-1]),
        (IMAGE > 3, IMAGE > 4),
        (b"1", b"2"),
        # As float32 the first two would be equal; NumPy has no bfloat16.
        (torch.tensor([2**40]), torch.tensor([2**40 + 1])),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)),
    ],
)
def test_other_data_are_unlike_on_one_host_and_between_hosts(one: Any, other: Any) -> None:
    assert unlike(only(one), only(other), same_host=True)
    assert unlike(only(one), only(other), same_host=False)


@pytest.mark.parametrize(
    ("one", "other", "on_one_host"),
    [
        (FLOATS, FLOATS * (1 + 1e-7), False),
        (FLOATS.half(), FLOATS.half() * (1 + 1e-3), False),
        (float("nan"), float("nan"), False),
        ("/node-1/tmp/a.png", "/node-2/scratch/a.png", False),
        (Path("/node-1/a.png"), Path("/node-2/a.png"), False),
        # Another decoder of the same JPEG.
        (IMAGE, np.clip(IMAGE.astype(int) + IMAGE % 3 - 1, 0, 255).astype(np.uint8), True),
        (FLOATS, FLOATS + 0.01 * FLOATS.flip(0), True),
    ],
)
def test_rounding_is_no_difference(one: Any, other: Any, on_one_host: bool) -> None:
    assert unlike(only(one), only(other), same_host=True) == on_one_host
    assert not unlike(only(one), only(other), same_host=False)


def test_a_small_difference_of_a_large_sample_is_seen_on_one_host() -> None:
    changed = torch.zeros(100, 100)
    changed[3:5, 3:5] = 1
    assert unlike(only(torch.zeros(100, 100)), only(changed), same_host=True)


def test_a_stream_is_described_by_its_labels_where_it_has_any() -> None:
    labelled = json.loads(describe_block([{"image": FLOATS, "label": number} for number in range(100)]))
    assert [[Leaf(*fields).path for fields in fields_of] for fields_of in labelled.values()] == [["['label']"]] * 8
    assert list(labelled)[-1] == "99"
    plain = json.loads(describe_block([(FLOATS, torch.zeros(2))]))
    assert [Leaf(*fields).path for fields in plain["0"]] == [".length", "[0]", "[1]"]


class Folder:
    """As torchvision's ImageFolder: both lists are one."""

    def __init__(self, root: str, names: list[str]) -> None:
        self.samples = self.imgs = [(f"{root}/{name}", number) for number, name in enumerate(names)]
        self.classes = ["cat", "dog"]
        self.targets = list(range(len(names)))

    def __len__(self) -> int:
        return len(self.samples)


def test_a_dataset_lists_its_files_whatever_folder_they_are_in() -> None:
    names = ["cat/1.png", "cat/2.png", "dog/1.png"]
    (listing,) = listings_of(Folder("/a", names))
    assert listing == ("dataset.samples", ["cat/1.png\n0", "cat/2.png\n1", "dog/1.png\n2"])
    (moved,) = listings_of(Folder("/b/c", names))
    assert moved.digest() == listing.digest()
    (other,) = listings_of(Folder("/a", [names[1], names[0], names[2]]))
    assert other.digest() != listing.digest()
    assert other.digest(2) == listing.digest(2)


def test_subsets_list_their_indices_and_the_files_they_choose() -> None:
    folder = Folder("/a", [f"{number}.png" for number in range(6)])
    indices, names = listings_of(Subset(Subset(folder, [5, 3, 1]), [2, 0]))
    assert (indices.label, indices.entries.tolist()) == ("dataset.indices", [1, 5])  # type: ignore[union-attr]
    assert names == ("dataset.dataset.dataset.samples", ["1.png\n1", "5.png\n5"])
    assert listings_of([{"image": "/a/1.nii", "label": "/a/2.nii"}]) == [("dataset", ["1.nii\n2.nii"])]
    assert listings_of([torch.zeros(1)]) == listings_of(torch.zeros(3)) == listings_of(3) == []
