# SPDX-License-Identifier: Apache-2.0
"""The process groups that torch keeps in this process."""

from __future__ import annotations

import torch.distributed as dist


def open_groups() -> list[object]:
    """Return every process group that is open."""
    return list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001


def num_groups() -> int:
    """Return how many process groups this rank is in: torch numbers the names of new groups by it."""
    return len(dist.distributed_c10d._world.pg_names)  # noqa: SLF001
