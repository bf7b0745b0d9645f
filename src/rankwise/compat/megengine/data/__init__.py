# SPDX-License-Identifier: Apache-2.0
"""``megengine.data``: the loader, and samplers that shard datasets."""

from __future__ import annotations

from rankwise.compat.megengine.alias import refusing
from rankwise.compat.megengine.data import dataset, transform
from rankwise.compat.megengine.data.dataloader import Collator, DataLoader
from rankwise.compat.megengine.data.sampler import (
    Infinite,
    MapSampler,
    RandomSampler,
    ReplacementSampler,
    Sampler,
    SequentialSampler,
    StreamSampler,
)

__all__ = [
    "Collator",
    "DataLoader",
    "Infinite",
    "MapSampler",
    "RandomSampler",
    "ReplacementSampler",
    "Sampler",
    "SequentialSampler",
    "StreamSampler",
    "dataset",
    "transform",
]

__getattr__ = refusing("megengine.data", __all__, {"get_worker_info": "torch.utils.data.get_worker_info"}.get)
