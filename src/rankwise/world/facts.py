# SPDX-License-Identifier: Apache-2.0
"""The facts about this process among its peers, as one frozen value. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.errors import rank_prefix


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The identity of this process. Created by :func:`rankwise.join`; never changes afterwards."""

    rank: int
    """Number of this process, from 0 to ``world_size - 1``."""
    world_size: int
    """Number of processes (ranks) of the job, on all machines."""
    local_rank: int
    """Number of this process among those on its machine."""
    local_world_size: int
    """Number of ranks on this machine."""
    node_rank: int
    """Number of this machine among the machines of the job."""
    num_nodes: int
    """Number of machines of the job."""
    device: str
    """The device of this rank, in the form ``tensor.to()`` accepts: ``"cuda:1"`` or ``"cpu"``."""
    backend: str
    """The backend that sends tensors between ranks: ``"nccl"``, ``"gloo"``, or ``"none"`` in a world of one."""
    hostname: str
    """Name of this machine."""
    source: str
    """What started this process, by name: ``"rankwise"``, ``"torchrun"``, ``"slurm"``, ... or ``"nobody"``."""

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the rank that logs and writes for all."""
        return self.rank == 0

    def __str__(self) -> str:
        return rank_prefix(self.rank, self.world_size, self.hostname)
