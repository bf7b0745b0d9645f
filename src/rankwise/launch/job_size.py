# SPDX-License-Identifier: Apache-2.0
"""The size of a job for a scheduler: machines, ranks, GPUs and cores; the same words for each of them.

Values only. Imported by the rooms of the schedulers.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.errors import ConfigurationError

SAVE_SECONDS = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSize:
    """How large a job is, what it is called, and how long it may take to save."""

    nodes: int = 1
    ranks_per_node: int | None = None
    """``None``: one per GPU, or one if no GPUs are requested."""
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    job_name: str = "rankwise"
    save_seconds: int = SAVE_SECONDS
    """How long before it is ended the job is notified to save and stop; 0: never."""

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("cpus_per_rank", 1), ("gpus_per_node", 0), ("save_seconds", 0)):
            if getattr(self, name) < least:
                option = f"--{name.replace('_', '-')}"
                raise ConfigurationError(
                    f"{option} must be >= {least}, got {getattr(self, name)}.",
                    do=f"pass {option} {least} or more, or remove it",
                )
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigurationError(f"--ranks-per-node must be >= 1, got {self.ranks_per_node}.", do="pass 1 or more")
        if 0 < self.gpus_per_node < self.num_ranks:
            raise ConfigurationError(
                f"{self.num_ranks} ranks per node need one GPU each, but --gpus-per-node is {self.gpus_per_node}.",
                do=f"pass --ranks-per-node {self.gpus_per_node}, or --gpus-per-node {self.num_ranks}",
            )

    @property
    def num_ranks(self) -> int:
        """The number of ranks per node."""
        return self.ranks_per_node or self.gpus_per_node or 1

    @property
    def cpus_per_node(self) -> int:
        """The number of CPU cores for each node's agent and its ranks."""
        return self.num_ranks * self.cpus_per_rank
