# SPDX-License-Identifier: Apache-2.0
"""``megengine.data``: the samplers that shard by themselves, for torch's DataLoader."""

from __future__ import annotations

from typing import Any

from rankwise.compat.megengine.data.sampler import (
    Infinite,
    MapSampler,
    RandomSampler,
    ReplacementSampler,
    Sampler,
    SequentialSampler,
)
from rankwise.compat.megengine.not_offered import refused

__all__ = ["Infinite", "MapSampler", "RandomSampler", "ReplacementSampler", "Sampler", "SequentialSampler"]

_NOT_OFFERED = {
    "Collator": "collate_fn= of torch.utils.data.DataLoader",
    "DataLoader": "torch.utils.data.DataLoader(dataset, batch_sampler=sampler), or rankwise.DataLoader",
    "StreamSampler": "a torch.utils.data.IterableDataset with rankwise.DataLoader, which gives each rank its samples",
    "dataset": "torch.utils.data",
    "transform": "transforms of torchvision or your own, in the dataset",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - nothing is returned
    raise refused("megengine.data", name, _NOT_OFFERED, __all__)
