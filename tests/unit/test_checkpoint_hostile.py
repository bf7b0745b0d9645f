# SPDX-License-Identifier: Apache-2.0
"""Manifests that no rankwise has written: refused as checkpoints, in reasonable time, and never by another error."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.load import load
from rankwise.checkpoint.manifest import Region, tiles
from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("world_of_one")

WRONG: list[Any] = [
    None,
    True,
    -1,
    2**80,
    1.5,
    "x",
    "0" * 8,
    [],
    {},
    [[]],
    [1, 2],
    {"tensor": "nowhere"},
    {"tensor": []},
    {"array": {}},
    {"dict": 1},
    {"dict": [[1]]},
    {"dict": [[{"dict": {}}, 1]]},
    {"tuple": 1},
    {"size": ["x"]},
    {"complex": [1]},
    {"int": "zz"},
    {"numpy": "float32"},
    {"numpy": "float32", "value": {"tuple": []}},
    {"ordered_dict": {}, "metadata": 1},
    {"counter": {"x": []}},
    {"other": 1},
]


def _objects() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "extra": {"steps": (3, 1.5), "mean": torch.ones(2)}}


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in pairs:
        yield from _places(part, (*path, key))


def _written(sections: dict[str, Any]) -> bytes:
    rest = (",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sections.items()) + "\n}\n").encode()
    return b'{"checksum": "sha256:' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def _altered(sections: dict[str, Any], path: tuple[Any, ...], wrong: object, *, removes: bool) -> dict[str, Any]:
    altered = copy.deepcopy(sections)
    inner: Any = altered
    for key in path[:-1]:
        inner = inner[key]
    if removes:
        del inner[path[-1]]
    else:
        inner[path[-1]] = wrong
    return altered


def test_any_manifest_is_loaded_or_refused(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path).save(**_objects())
    manifest = path / "manifest.json"
    sections = json.loads(manifest.read_bytes())
    del sections["checksum"]
    objects, failed, num_refused = _objects(), [], 0
    for number, place in enumerate(_places(sections)):
        # Each wrong thing comes to each kind of place: they are of about forty kinds.
        for wrong in [*WRONG[number % 2 :: 2], "removed"]:
            manifest.write_bytes(_written(_altered(sections, place, wrong, removes=wrong == "removed")))
            try:
                load(path, **objects)
            except CheckpointError:
                num_refused += 1
            except Exception as error:  # noqa: BLE001 - every other one is what the test looks for
                failed.append((place, wrong, repr(error)))
    assert failed == []
    assert num_refused > 1000


@pytest.mark.parametrize("shape", [[10**11], [3, 10**7], [2, 2**62]])
def test_a_shape_larger_than_its_file_is_refused_before_memory_is_allocated(tmp_path: Path, shape: list[int]) -> None:
    path = Checkpointer(tmp_path).save(extra={"t": torch.ones(3, 2)})
    manifest = path / "manifest.json"
    sections = json.loads(manifest.read_bytes())
    del sections["checksum"]
    sections["tensors"]["extra.t"]["shape"] = shape
    manifest.write_bytes(_written(sections))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    # What is allocated beyond the file fails with another error.
    resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20, hard))
    try:
        with pytest.raises(CheckpointError, match=r"part-00000.safetensors has \d+ bytes, too few for extra.t"):
            load(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("name", ["manifest.json", "part-00000.safetensors"])
def test_a_path_that_is_not_a_plain_file_is_refused_immediately(tmp_path: Path, name: str) -> None:
    path = Checkpointer(tmp_path).save(**_objects())
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: it is not a regular file"):
        load(path, **_objects())


@pytest.mark.parametrize("dim", [0, 1])
def test_many_parts_are_checked_in_time(dim: int) -> None:
    # Compared in pairs, twenty thousand take minutes: the limit of each test would end it.
    num = 20_000

    def region(start: int, size: int) -> Region:
        return Region((start, 0), (size, 3)) if dim == 0 else Region((0, start), (3, size))

    regions = [region(2 * number, 2) for number in range(num)]
    shape = (2 * num, 3) if dim == 0 else (3, 2 * num)
    assert tiles(regions, shape)
    assert not tiles([*regions[:-2], region(2 * num - 4, 3), region(2 * num - 2, 1)], shape)


@pytest.mark.parametrize("counts", [(150, 140), (28, 28, 28)])
def test_many_parts_along_several_dims_are_checked_in_time(counts: tuple[int, ...]) -> None:
    places = itertools.product(*map(range, counts))
    regions = [Region(tuple(2 * number for number in place), (2,) * len(counts)) for place in places]
    shape = tuple(2 * count for count in counts)
    assert tiles(regions, shape)
    assert not tiles([*regions[:-1], regions[0]], shape)
