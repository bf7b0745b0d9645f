# SPDX-License-Identifier: Apache-2.0
"""The facts a process can determine about its machine alone.

Evaluates nothing and sends nothing. Imported by this room's ``examine``.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
from pathlib import Path

import torch

from rankwise.doctor.facts import Machine
from rankwise.errors import ConfigurationError
from rankwise.version import VERSION
from rankwise.world import network
from rankwise.world.device import accelerator
from rankwise.world.device.choice import backend_of, known_backends

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - its size is looked at
NO_LIMIT = -1


def machine(port: int = 0) -> Machine:
    """Return what this process sees of its machine.

    Args:
        port: a port that must be free; 0 checks none.
    """
    hostname = socket.gethostname()
    open_files, open_files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    total, free = _shared_memory()
    kind = accelerator.shown_kind().name
    return Machine(
        hostname=hostname,
        versions=_versions(),
        gpus=tuple(accelerator.names()),
        num_gpu_files=accelerator.num_driver_files(),
        device_type=kind,
        device_backend=backend_of(kind),
        backends=tuple(known_backends()),
        interfaces=tuple(network.interfaces()),
        own_name_addresses=tuple(_resolved(hostname)),
        own_addresses=tuple(network.own_addresses()),
        free_port_error=_bind_error(0),
        port=port,
        port_error=_bind_error(port) if port else "",
        shared_memory_bytes=total,
        shared_memory_free_bytes=free,
        open_files_limit=open_files,
        open_files_hard_limit=open_files_hard,
        processes_limit=_processes_limit(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        num_threads=torch.get_num_threads(),
    )


def _versions() -> dict[str, str]:
    own = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "rankwise": VERSION,
    }
    nccl = accelerator.nccl_version()
    return own | accelerator.toolkits() | ({} if nccl is None else {"nccl": ".".join(map(str, nccl))})


def _resolved(host: str) -> list[str]:
    try:
        return network.resolve(host)
    except ConfigurationError:
        return []


def _bind_error(port: int) -> str:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        return str(error.strerror)
    return ""


def _shared_memory() -> tuple[int, int]:
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _processes_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The kernel does not apply it to root.
    limits = [] if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else [soft]
    for path in (Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids/pids.max")):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        limits += [int(text)] if text.isdecimal() else []
    return min(limits, default=NO_LIMIT)
