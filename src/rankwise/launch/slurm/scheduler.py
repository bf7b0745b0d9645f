# SPDX-License-Identifier: Apache-2.0
"""Settings from a scheduler that has started one launcher on each machine. No torch.

Imported by the launcher's start.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError
from rankwise.world.environments.process import nodes_of_job, read_launcher

if TYPE_CHECKING:
    from rankwise.launch.options import LaunchOptions


def unused_nodes() -> str:
    """Return a warning if this launcher is in a Slurm job of several nodes and uses only one; else an empty text."""
    number = nodes_of_job()
    if number < 2:  # noqa: PLR2004 - a job of one node leaves none unused
        return ""
    return (
        f"[rankwise] this Slurm job has {number} nodes, but this launcher uses only one; to use all: "
        "srun --ntasks-per-node=1 rankwise run ...\n"
    )


def with_scheduler(options: LaunchOptions) -> LaunchOptions:
    """Return ``options`` with the machines of a scheduler that has started one launcher on each.

    Slurm's step variables, and plain ``RANK`` and ``WORLD_SIZE`` as Kubernetes' PyTorchJob sets them, then number
    the machines.

    Raises:
        ConfigurationError: several launchers were started on one machine, or rank 0's address is missing.
    """
    if options.nodes[1] > 1 or options.rendezvous is not None:
        return options
    reading = read_launcher()
    if reading is None or reading.world_size == 1:
        return options
    if (reading.local_world_size or 1) > 1:
        raise ConfigurationError(
            f"{reading.local_world_size} launchers were started on this machine, but one is enough.",
            evidence=reading.reason,
            do="srun --ntasks-per-node=1 rankwise run -n RANKS_PER_NODE train.py\n"
            "or start the ranks themselves: srun python train.py",
        )
    size = reading.world_size
    return replace(
        options, nodes=(size, size), node_rank=reading.rank, rendezvous=reading.address, told_by_scheduler=True
    )
