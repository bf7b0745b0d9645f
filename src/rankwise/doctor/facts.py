# SPDX-License-Identifier: Apache-2.0
"""What one rank knows of its machine and of the others, as values that are sent as JSON.

Pure. Imported by this room's other files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rankwise.world.device.kinds import EXAMPLE
from rankwise.world.network import Interface, Route  # noqa: TC001 - looked up when facts are read from JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a process sees of its machine by itself.

    Its many fields are sent as one value, and each is what one check needs.
    """

    hostname: str
    versions: dict[str, str]
    """``python``, ``torch``, ``rankwise``, and CUDA, ROCm and NCCL if torch has them."""
    gpus: tuple[str, ...]
    """Names of the GPUs that torch can use."""
    num_gpu_files: int
    """How many GPUs the driver shows, whether torch can use them or not."""
    backends: tuple[str, ...]
    interfaces: tuple[Interface, ...]
    own_name_addresses: tuple[str, ...]
    """What the machine's own name resolves to here; empty if it does not resolve."""
    own_addresses: tuple[str, ...]
    """Addresses at which other machines may reach it."""
    free_port_error: str
    """Why no port could be bound; empty if one could."""
    port: int
    """A port that must be free before ranks start; 0 if none is checked."""
    port_error: str
    shared_memory_bytes: int
    """Size of ``/dev/shm``; 0 if there is none."""
    shared_memory_free_bytes: int
    open_files_limit: int
    open_files_hard_limit: int
    processes_limit: int
    """The lowest of the limits on processes and threads; -1 if there is none."""
    cores: tuple[int, ...]
    """Ids of the cores this process may use."""
    num_threads: int
    """Number of compute threads of torch."""
    device_type: str = EXAMPLE.name
    """Torch's name for this machine's GPU or other accelerator."""
    device_backend: str = "nccl"
    """The backend torch would use for its tensors, whether this torch has it or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Across:
    """What a rank determined together with the others."""

    routes: dict[str, Route] = field(default_factory=dict)
    """The route to each other host, by its name; determined by one rank per host."""
    no_routes: dict[str, str] = field(default_factory=dict)
    """Why there is no route to a host."""
    store_route: Route | None = None
    clock_ahead_seconds: float | None = None
    """How far this host's clock is ahead of rank 0's; ``None`` on rank 0's host."""
    clock_error_seconds: float = 0.0
    """The largest error of that."""
    shared_folder_error: str = ""
    """Why this host does not see the file that rank 0 wrote into the shared folder."""
    wrong_sum_bytes: tuple[int, ...] = ()
    """Sizes for which an all_reduce gave this rank wrong values."""
    wrong_from: tuple[int, ...] = ()
    """Ranks whose tensors arrived here with wrong values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All facts of one rank."""

    rank: int
    world_size: int
    source: str
    """What started it."""
    store: str = ""
    """Host and port of the job's store; empty if there is none."""
    machine: Machine
    across: Across | None = None
    """``None`` if the rank is alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long one all_reduce takes."""

    num_bytes: int
    seconds: float
    """The median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExaminedJob:
    """The facts that the checks evaluate."""

    ranks: tuple[Facts, ...]
    """In rank order; without ranks that never answered."""
    timings: tuple[Timing, ...] = ()
    shared_folder: str = ""
    """The folder every host must see; empty if none is checked."""

    @property
    def hosts(self) -> list[list[Facts]]:
        """The ranks of each host, first hosts first."""
        by_name: dict[str, list[Facts]] = {}
        for facts in self.ranks:
            by_name.setdefault(facts.machine.hostname, []).append(facts)
        return list(by_name.values())
