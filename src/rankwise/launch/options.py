# SPDX-License-Identifier: Apache-2.0
"""The options of a launch, checked before anything starts.

Values only. Imported by the command line and by the launcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rankwise.errors import ConfigurationError

RENDEZVOUS_TIMEOUT_SECONDS = 600.0
TorchStoreChoice = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """The options of this machine's part of a launch.

    Its many fields are the options of ``rankwise run``, which is built from them.
    """

    num_ranks: int | None = None
    """Number of ranks on this machine; ``None`` starts one per GPU, or one if there is no GPU."""
    device: Literal["auto", "cpu"] = "auto"
    """``"cpu"`` hides the GPUs from the ranks."""
    log_dir: str | None = None
    """A folder for ``rank-0.out``, ``rank-0.err`` and so on; created if it does not exist."""
    max_restarts: int = 0
    """How often all ranks are restarted after a failure."""
    nodes: tuple[int, int] = (1, 1)
    """The fewest and the most machines that the job runs on."""
    node_rank: int | None = None
    """Number of this machine; ``None`` numbers the machines in the order they join."""
    rendezvous: tuple[str, int] | None = None
    """Host and port where the machines meet: an address of one of them, the same on all."""
    told_by_scheduler: bool = False
    """Whether a scheduler named the rendezvous, for which ``localhost`` on node 0 is node 0 itself."""
    served_elsewhere: bool = False
    """Whether no machine serves the job but the process that started them: the driver of a job on Ray."""
    rendezvous_timeout_seconds: float = RENDEZVOUS_TIMEOUT_SECONDS
    """How long the machines wait for one another at the start."""
    interface: str | None = None
    """Network interface for traffic between ranks; ``None`` takes the one that leads to the rendezvous."""
    check: bool = False
    """Whether ranks compare their collectives, including gradients, before they send."""
    guard: bool = False
    """Whether the ranks of a torch.distributed script compare what their optimizers step."""
    report: str | None = None
    """The folder in which ranks record their steps; ``"off"`` measures nothing. Absolute: scripts may change theirs."""
    progress: bool = False
    """Whether one line about the whole job is shown while it runs."""
    controller: bool = False
    """Whether rank 0 alone runs the script (--auto): it reads this process's stdin and receives its signals."""
    torch_store: TorchStoreChoice = "auto"
    """Whether MASTER_ADDR and MASTER_PORT point to torch's own store; ``"auto"``: on one machine only."""

    def __post_init__(self) -> None:
        if self.num_ranks is not None and self.num_ranks < 1:
            raise ConfigurationError(
                f"The number of ranks must be >= 1, got {self.num_ranks}.",
                do="pass -n 1 or more, or omit -n: one rank per GPU, else one",
            )
        if self.max_restarts < 0:
            raise ConfigurationError(f"max_restarts must be >= 0, got {self.max_restarts}.", do="pass 0 or more")
        if self.rendezvous_timeout_seconds <= 0:
            raise ConfigurationError(
                f"The rendezvous timeout must be > 0 s, got {self.rendezvous_timeout_seconds:g}.",
                do="pass a positive number",
            )
        self._check_nodes()

    def _check_nodes(self) -> None:
        fewest, most = self.nodes
        if not 1 <= fewest <= most:
            raise ConfigurationError(
                f"nodes must be N, or MIN:MAX with 1 <= MIN <= MAX, got {fewest}:{most}.",
                do="pass one number, or the fewest and the most: --nodes 1:4",
            )
        if most > 1 and self.rendezvous is None:
            raise ConfigurationError(
                f"{most} machines need a rendezvous.",
                do="pass --rendezvous HOST:PORT, an address of the first machine, the same on all; "
                "or --hosts a,b to start all of them from here",
            )
        if self.node_rank is not None and not 0 <= self.node_rank < most:
            raise ConfigurationError(
                f"node_rank must be from 0 to {most - 1}, got {self.node_rank}.",
                do="number the machines from 0, or omit node_rank: they are numbered as they join",
            )

    @property
    def can_restart(self) -> bool:
        """Whether a restart is possible: after a failure, or because the number of machines changes."""
        return self.max_restarts > 0 or self.nodes[0] < self.nodes[1]
