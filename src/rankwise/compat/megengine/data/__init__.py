# SPDX-License-Identifier: Apache-2.0
"""``megengine.data``: the loader, and samplers that shard datasets."""

from __future__ import annotations

from rankwise.compat.megengine.data import dataset, transform
from rankwise.compat.megengine.data.collator import Collator
from rankwise.compat.megengine.data.dataloader import DataLoader
from rankwise.compat.megengine.data.sampler import (
    Infinite,
    MapSampler,
    RandomSampler,
    ReplacementSampler,
    Sampler,
    SequentialSampler,
    StreamSampler,
)
from rankwise.compat.megengine.not_offered import refusing

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
