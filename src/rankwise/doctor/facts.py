# SPDX-License-Identifier: Apache-2.0
"""What one rank knows of its machine, and of the others, as values that travel as JSON.

Pure. Imported by this room's other files.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rankwise.world.device.kinds import EXAMPLE
from rankwise.world.network import Interface, Route


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a process sees of its machine, alone."""

    hostname: str
    versions: dict[str, str]
    """``python``, ``torch``, ``rankwise``, and of CUDA, ROCm and NCCL where torch has them."""
    gpus: tuple[str, ...]
    """Names of the GPUs that torch can use."""
    num_gpu_files: int
    """How many GPUs the driver shows, whether torch can use them or not."""
    backends: tuple[str, ...]
    interfaces: tuple[Interface, ...]
    own_name_addresses: tuple[str, ...]
    """What the machine's own name means here; empty where nobody knows it."""
    own_addresses: tuple[str, ...]
    """Where other machines may reach it."""
    free_port_error: str
    """Why no port could be bound; empty where one could."""
    port: int
    """A port that is to be free before anything starts; 0 where none is asked about."""
    port_error: str
    shared_memory_bytes: int
    """Size of ``/dev/shm``; 0 where there is none."""
    shared_memory_free_bytes: int
    open_files_limit: int
    open_files_hard_limit: int
    processes_limit: int
    """The lowest of the limits on processes and threads; -1 where there is none."""
    cores: tuple[int, ...]
    """Numbers of the cores this process may use."""
    num_threads: int
    """How many threads torch computes with."""
    device_type: str = EXAMPLE.name
    """What torch calls a GPU, or other accelerator, of this machine."""
    device_backend: str = "nccl"
    """What torch would carry its tensors with, whether this torch has it or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Across:
    """What a rank found out together with the others."""

    routes: dict[str, Route] = field(default_factory=dict)
    """The way to each other host, by its name; asked by one rank per host."""
    no_routes: dict[str, str] = field(default_factory=dict)
    """Why there is no way to a host."""
    store_route: Route | None = None
    clock_ahead_seconds: float | None = None
    """How far this host's clock is ahead of rank 0's; ``None`` on rank 0's host."""
    clock_error_seconds: float = 0.0
    """By how much that may be off."""
    shared_folder_error: str = ""
    """Why this host does not see what rank 0 wrote into the shared folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything of one rank."""

    rank: int
    world_size: int
    source: str
    """Who started it."""
    store: str = ""
    """Host and port of the job's store; empty where there is none."""
    machine: Machine
    across: Across | None = None
    """``None`` where the rank is alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long one all_reduce takes."""

    num_bytes: int
    seconds: float
    """The median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExaminedJob:
    """What all that is judged stands on."""

    ranks: tuple[Facts, ...]
    """In rank order; without those that never answered."""
    timings: tuple[Timing, ...] = ()
    shared_folder: str = ""
    """The folder every host is to see; empty where none is asked about."""

    @property
    def hosts(self) -> list[list[Facts]]:
        """The ranks of each host, first hosts first."""
        by_name: dict[str, list[Facts]] = {}
        for facts in self.ranks:
            by_name.setdefault(facts.machine.hostname, []).append(facts)
        return list(by_name.values())


def machine_to_json(machine: Machine) -> str:
    """Return a machine as text."""
    return json.dumps(asdict(machine))


def machine_from_json(text: str | bytes) -> Machine:
    """Return the machine that :func:`machine_to_json` wrote down."""
    read: dict[str, Any] = json.loads(text)
    interfaces = tuple(Interface(**(one | {"addresses": tuple(one["addresses"])})) for one in read.pop("interfaces"))
    lists: dict[str, Any] = {name: tuple(value) for name, value in read.items() if isinstance(value, list)}
    return Machine(**(read | lists), interfaces=interfaces)


def across_to_json(across: Across) -> str:
    """Return what a rank found out as text."""
    return json.dumps(asdict(across))


def across_from_json(text: str | bytes) -> Across:
    """Return what :func:`across_to_json` wrote down."""
    read: dict[str, Any] = json.loads(text)
    read["routes"] = {hostname: Route(**route) for hostname, route in read["routes"].items()}
    if read["store_route"] is not None:
        read["store_route"] = Route(**read["store_route"])
    return Across(**read)
