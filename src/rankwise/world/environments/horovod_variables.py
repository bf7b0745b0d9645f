# SPDX-License-Identifier: Apache-2.0
"""The variables that horovodrun sets to identify each of its ranks.

Scripts and libraries read them directly: to do something "only on rank 0", or to tell whether there are ranks. Pure.
Imported by ``process``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.world.environments.reading import Reading


def horovod_variables(reading: Reading) -> dict[str, str]:
    """Return horovodrun's variables for a rank; those that ``reading`` leaves open are omitted.

    Source: Horovod 0.28.1, ``horovod/runner/gloo_run.py``. The cross rank is the number of this machine among those
        that have a rank of the same local rank.
    """
    numbers = {
        "RANK": reading.rank,
        "SIZE": reading.world_size,
        "LOCAL_RANK": reading.local_rank,
        "LOCAL_SIZE": reading.local_world_size,
    }
    counts = _ranks_per_node(reading)
    if counts is not None and reading.local_rank is not None and reading.node_rank is not None:
        machines = [number for number, count in enumerate(counts) if count > reading.local_rank]
        numbers |= {"CROSS_RANK": machines.index(reading.node_rank), "CROSS_SIZE": len(machines)}
    return {f"HOROVOD_{name}": str(number) for name, number in numbers.items() if number is not None}


def _ranks_per_node(reading: Reading) -> Sequence[int] | None:
    if reading.ranks_per_node is not None:
        return reading.ranks_per_node
    if reading.num_nodes is None or reading.local_world_size is None:
        return None
    # Machines of different sizes cannot be distinguished here.
    is_even = reading.num_nodes * reading.local_world_size == reading.world_size
    return [reading.local_world_size] * reading.num_nodes if is_even else None
