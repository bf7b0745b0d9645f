# SPDX-License-Identifier: Apache-2.0
"""What can be chosen about a launch, checked before anything starts.

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
    """What can be chosen about this machine's part of a launch."""

    num_ranks: int | None = None
    """How many ranks on this machine; ``None`` starts one per GPU, or one where there is no GPU."""
    device: Literal["auto", "cpu"] = "auto"
    """``"cpu"`` hides the GPUs from the ranks."""
    log_dir: str | None = None
    """A folder that gets ``rank-0.out``, ``rank-0.err`` and so on; made if it is not there."""
    max_restarts: int = 0
    """How often all ranks are started anew after a failure."""
    nodes: tuple[int, int] = (1, 1)
    """The fewest and the most machines that the job runs on."""
    node_rank: int | None = None
    """Number of this machine; ``None`` lets the machines be numbered in the order they come."""
    rendezvous: tuple[str, int] | None = None
    """Host and port where the machines meet: an address of one of them, the same on all."""
    told_by_scheduler: bool = False
    """Whether a scheduler named the rendezvous, for which ``localhost`` on node 0 is node 0 itself."""
    rendezvous_timeout_seconds: float = RENDEZVOUS_TIMEOUT_SECONDS
    """How long the machines wait for one another at the start."""
    interface: str | None = None
    """Network interface that carries what the ranks send; ``None`` takes the one that leads to the rendezvous."""
    check: bool = False
    """Whether ranks compare their collectives, gradients included, before they send."""
    guard: bool = False
    """Whether ranks of a script of torch.distributed compare what their optimizers step."""
    torch_store: TorchStoreChoice = "auto"
    """Whether MASTER_ADDR and MASTER_PORT lead to torch's own store; ``"auto"`` says so on one machine only."""

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if self.num_ranks is not None and self.num_ranks < 1:
            raise ConfigurationError(
                f"{self.num_ranks} ranks cannot be started.",
                do="pass -n 1 or more, or leave -n out: one rank per GPU, else one",
            )
        if self.max_restarts < 0:
            raise ConfigurationError(f"max_restarts is {self.max_restarts}.", do="pass 0 or more")
        if self.rendezvous_timeout_seconds <= 0:
            raise ConfigurationError(
                f"The rendezvous timeout is {self.rendezvous_timeout_seconds:g} s.", do="pass a number above 0"
            )
        self._check_nodes()

    def _check_nodes(self) -> None:
        fewest, most = self.nodes
        if not 1 <= fewest <= most:
            raise ConfigurationError(
                f"nodes is {fewest}:{most}.", do="pass one number, or the fewest and the most: --nodes 1:4"
            )
        if most > 1 and self.rendezvous is None:
            raise ConfigurationError(
                f"{most} machines were asked for, and nothing says where they meet.",
                do="pass --rendezvous HOST:PORT, an address of the first machine, the same on all; "
                "or --hosts a,b to start all of them from here",
            )
        if self.node_rank is not None and not 0 <= self.node_rank < most:
            raise ConfigurationError(
                f"node_rank is {self.node_rank}, and the nodes go from 0 to {most - 1}.",
                do="number the machines from 0, or leave node_rank out: they are numbered as they come",
            )

    @property
    def is_elastic(self) -> bool:
        """Whether the number of machines may change."""
        return self.nodes[0] < self.nodes[1]

    @property
    def can_restart(self) -> bool:
        """Whether anything may be started anew."""
        return self.max_restarts > 0 or self.is_elastic
