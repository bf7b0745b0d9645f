# SPDX-License-Identifier: Apache-2.0
"""rankwise: one PyTorch training script on any number of ranks, with the result one rank would give."""

from rankwise.agreement import rank_zero_first
from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.load import load
from rankwise.checkpoint.save import save
from rankwise.collectives import (
    all_gather,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object,
)
from rankwise.data.loader import DataLoader
from rankwise.data.sampler import ShardedSampler
from rankwise.data.shared import share
from rankwise.log import log
from rankwise.parallel.replicate import no_sync, replicate, weight
from rankwise.process_group import join, leave
from rankwise.progress import print, progress  # noqa: A004 - prints on rank zero
from rankwise.world import World

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "DataLoader",
    "ShardedSampler",
    "World",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "join",
    "leave",
    "load",
    "log",
    "no_sync",
    "print",
    "progress",
    "rank_zero_first",
    "replicate",
    "save",
    "share",
    "weight",
]
