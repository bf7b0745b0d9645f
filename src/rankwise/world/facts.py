# SPDX-License-Identifier: Apache-2.0
"""The facts about this process among its peers, as one frozen value. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.errors import rank_prefix


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Who this process is. Opened by :func:`rankwise.join`; never changes afterwards."""

    rank: int
    """Number of this process, from 0 to ``world_size - 1``."""
    world_size: int
    """How many processes (ranks) work together, on all machines."""
    local_rank: int
    """Number of this process among those of its machine."""
    local_world_size: int
    """How many ranks this machine has."""
    node_rank: int
    """Number of this machine among the machines of the job."""
    num_nodes: int
    """How many machines the job has."""
    device: str
    """The device of this rank, as ``tensor.to()`` takes it: ``"cuda:1"`` or ``"cpu"``."""
    backend: str
    """What carries tensors between ranks: ``"nccl"``, ``"gloo"``, or ``"none"`` in a world of one."""
    hostname: str
    """Name of this machine."""
    source: str
    """Who started this process, by name: ``"rankwise"``, ``"torchrun"``, ``"slurm"``, ... or ``"nobody"``."""

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the rank that speaks and writes for all."""
        return self.rank == 0

    def __str__(self) -> str:
        return rank_prefix(self.rank, self.world_size, self.hostname)
