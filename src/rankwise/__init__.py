# SPDX-License-Identifier: Apache-2.0
"""rankwise: one PyTorch training script on any number of ranks, with the result one rank would give."""

from rankwise.collectives import (
    all_gather,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object,
)
from rankwise.parallel.replicate import no_sync, replicate, weight
from rankwise.process_group import join, leave
from rankwise.progress import print, progress  # noqa: A004 - the rank-zero print
from rankwise.world import World
