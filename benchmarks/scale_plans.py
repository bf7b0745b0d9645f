# SPDX-License-Identifier: Apache-2.0
"""Planning a save and a load on rank zero, with the reports of as many ranks: a part of benchmarks/scale.py.

The project's own code plans; only the reports of the other ranks are invented. Rank zero holds the first of 64 stages
of a model of 1,024 tensors, and as many replicas of each stage make up the ranks.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import torch

from rankwise.checkpoint import content, manifest
from rankwise.checkpoint.manifest import FileEntry, Manifest

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TENSORS, MOST_STAGES = 1024, 64
FILE_BYTES = 2**30


class InventedRanks:
    """Rank zero of many: the others report what they would."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = 0, world_size
        self._num_stages = min(MOST_STAGES, world_size)

    def confirm(self, label: str, work: Callable[[], Any]) -> list[Any]:
        """Return the result of this rank, and of all others."""
        own = work()
        if label == "reading the state to save":
            digest, of_report, generators = own
            texts = [of_report if stage == 0 else f"{stage:064x}" for stage in range(self._num_stages)]
            return [(digest, texts[rank % self._num_stages], generators) for rank in range(self.world_size)]
        if label == "reporting which rank holds what":
            # As they arrive: as text.
            texts = [json.dumps(_report(own, stage, self._num_stages)) for stage in range(1, self._num_stages)]
            return [own, *map(json.loads, texts)]
        raise ValueError(label)


def _report(own: list[Any], stage: int, num_stages: int) -> list[Any]:
    tensors = {
        name: (dtype, shape, [[0, 0], shape] if number % num_stages == stage else None)
        for number, (name, (dtype, shape, _)) in enumerate(own[0].items())
    }
    return [tensors, own[1], own[2]]


def plan(world_size: int) -> dict[str, float]:
    """Return the seconds that planning a save and a load takes on rank zero."""
    state = {
        f"layers.{number}.weight": torch.empty(
            256, 256, device="cpu" if number % min(MOST_STAGES, world_size) == 0 else "meta"
        )
        for number in range(NUM_TENSORS)
    }
    begun = time.perf_counter()
    planned = content.read(InventedRanks(world_size), {"model": state})  # type: ignore[arg-type]
    checksums = ["00000000"] * (FILE_BYTES // manifest.PIECE_BYTES)
    names = [content.PART_NAME.format(rank) for rank in range(world_size)]
    entries = {name: FileEntry(name=name, size_bytes=FILE_BYTES, checksums=checksums) for name in names}
    data = manifest.encode(
        Manifest(
            rankwise_version="",
            torch_version="",
            world_size=world_size,
            files=entries,
            tensors=planned.entries,
            objects=planned.gathered.objects,
        )
    )
    saved = time.perf_counter()
    found = manifest.decode(data)
    manifest.pieces_to_check(found.files, 0, world_size)
    return {"save": saved - begun, "load": time.perf_counter() - saved, "manifest megabytes": len(data) / 1e6}
