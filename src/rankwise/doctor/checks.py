# SPDX-License-Identifier: Apache-2.0
"""Evaluates the gathered facts: one function per check, and the table of checks.

Pure: facts in, findings out. Imported by ``examine`` and ``cli``.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.errors import fold_ranks, fold_values
from rankwise.world import torch_versions
from rankwise.world.device.kinds import kind_named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.doctor.facts import ExaminedJob, Facts

OK, WARNING, ERROR = "ok", "warning", "error"
MUST_BE_EQUAL = ("torch", "rankwise", "nccl")
"""Packages whose versions must not differ between ranks, as that fails later; others may differ."""
LEAST_SHARED_MEMORY_BYTES = 2**30
LEAST_OPEN_FILES = 1024
OPEN_FILES_PER_PEER = 8
"""Gloo keeps one connection per peer and group."""
WANTED_OPEN_FILES = 65536
LEAST_PROCESSES = 256
PROCESSES_PER_RANK = 64
CLOCK_WARNING_SECONDS = 1.0
CLOCK_ERROR_SECONDS = 60.0
SLOW_BYTES_PER_SECOND = 100e6
"""Less than the throughput of 1 Gbit/s Ethernet."""
LARGE_BYTES = 2**20
"""From this size on, an all_reduce measures bandwidth rather than latency."""
MIB, GIB = 2**20, 2**30
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - its size is judged


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The result of one check."""

    check: str
    level: str
    """``ok``, ``warning`` or ``error``."""
    what: str
    do: str = ""
    """The next command or setting, one per line; empty if there is nothing to do."""
    evidence: str = ""
    """The evidence, one fact per line, if ``what`` is not complete."""


def judge(job: ExaminedJob) -> list[CheckResult]:
    """Return the findings of every check on a job, in the table's order."""
    return [finding for check in CHECKS for finding in check(job)]


def versions(job: ExaminedJob) -> list[CheckResult]:
    """Find versions that differ between ranks, and a torch that was not tested."""
    names = list(dict.fromkeys(name for facts in job.ranks for name in facts.machine.versions))
    found: list[CheckResult] = []
    same: list[str] = []
    for name in names:
        held = {facts.rank: facts.machine.versions.get(name, "missing") for facts in job.ranks}
        if len(set(held.values())) == 1:
            same.append(f"{name} {next(iter(held.values()))}")
            continue
        level = ERROR if name in MUST_BE_EQUAL else WARNING
        told = "; ".join(fold_values(held).splitlines())
        do = f"install the same {name} on every machine, or start the ranks from one shared environment"
        found.append(CheckResult(check="versions", level=level, what=f"{name} differs: {told}", do=do))
    if same:
        found.append(CheckResult(check="versions", level=OK, what=", ".join(same)))
    torch = job.ranks[0].machine.versions.get("torch")
    if torch is not None and not torch_versions.is_tested(torch):
        what = f"rankwise was not tested on torch {torch}: strategies check their gradients on first use"
        found.append(CheckResult(check="versions", level=OK, what=what))
    return found


def gpus(job: ExaminedJob) -> list[CheckResult]:
    """Find GPUs that torch cannot use, or that differ between hosts."""
    found: list[CheckResult] = []
    held: dict[int, str] = {}
    for facts in job.ranks:
        machine = facts.machine
        counts = {name: machine.gpus.count(name) for name in machine.gpus}
        held[facts.rank] = ", ".join(f"{count}x {name}" for name, count in counts.items()) or "no GPU"
    for first, *_ in job.hosts:
        machine = first.machine
        if machine.num_gpu_files and not machine.gpus:
            what = f"{machine.hostname} has {machine.num_gpu_files} GPUs, but torch can use none of them"
            kind = kind_named(machine.device_type)
            do = kind.examine + (f"; unset {kind.visible} if it hides them" if kind.visible else "")
            found.append(CheckResult(check="GPUs", level=WARNING, what=what, do=do))
        elif machine.gpus and machine.device_backend not in machine.backends:
            title, backend = kind_named(machine.device_type).title, machine.device_backend.upper()
            what, do = f"torch on {machine.hostname} has {title}s but no {backend}", f"install a torch with {backend}"
            found.append(CheckResult(check="GPUs", level=ERROR, what=what, do=do))
    if len(set(held.values())) > 1:
        told = "; ".join(fold_values(held).splitlines())
        do = "start as many ranks on each host as it has GPUs, or pass --device cpu on all of them"
        found.append(CheckResult(check="GPUs", level=WARNING, what=f"ranks see different GPUs: {told}", do=do))
    if found:
        return found
    backends = ", ".join(job.ranks[0].machine.backends)
    each = " on each host" if len(job.hosts) > 1 else ""
    return [CheckResult(check="GPUs", level=OK, what=f"{held[job.ranks[0].rank]}{each}; backends: {backends}")]


def networks(job: ExaminedJob) -> list[CheckResult]:
    """Find hosts without a route to the store or to one another."""
    found: list[CheckResult] = []
    ways: list[str] = []
    for first, *_ in job.hosts:
        machine = first.machine
        if not any(one.is_loopback and one.is_up for one in machine.interfaces):
            what = f"the loopback interface of {machine.hostname} is down: no rank there can reach another"
            found.append(CheckResult(check="network", level=ERROR, what=what, do="ip link set lo up"))
        if len(job.hosts) > 1 and not machine.own_addresses:
            what = f"{machine.hostname} has no address that other hosts can reach"
            found.append(CheckResult(check="network", level=ERROR, what=what, do="ip -brief address"))
        across = first.across
        for hostname, why in {} if across is None else across.no_routes.items():
            what = f"no route from {machine.hostname} to {hostname}: {why}"
            do = f"on {machine.hostname}: ip route; getent hosts {hostname}"
            found.append(CheckResult(check="network", level=ERROR, what=what, do=do))
        if across is not None and across.routes:
            through = sorted({route.interface for route in across.routes.values()})
            ways.append(f"{machine.hostname} through {', '.join(through)}")
    if found:
        return found
    if ways:
        return [CheckResult(check="network", level=OK, what=f"between hosts: {'; '.join(ways)}")]
    told = [f"{one.name} {', '.join(one.addresses)}" for one in job.ranks[0].machine.interfaces if one.addresses]
    return [CheckResult(check="network", level=OK, what="; ".join(told))]


def store(job: ExaminedJob) -> list[CheckResult]:
    """Show the route of each rank to the job's store."""
    if not job.ranks[0].store or job.ranks[0].across is None:
        return []
    ways = {
        facts.rank: facts.across.store_route.interface
        for facts in job.ranks
        if facts.across is not None and facts.across.store_route is not None
    }
    told = "; ".join(
        f"{who} through {way}" for who, way in (line.split(": ") for line in fold_values(ways).splitlines())
    )
    return [CheckResult(check="store", level=OK, what=f"{job.ranks[0].store}{', ' if told else ''}{told}")]


def own_names(job: ExaminedJob) -> list[CheckResult]:
    """Find hosts whose own name resolves to loopback, or not at all."""
    found: list[CheckResult] = []
    fine: list[str] = []
    for first, *_ in job.hosts:
        machine = first.machine
        addresses = ", ".join(machine.own_name_addresses)
        use = machine.own_addresses[0] if machine.own_addresses else "an address"
        means_nothing, means_loopback = not addresses, all(_is_loopback(a) for a in machine.own_name_addresses)
        if len(job.hosts) > 1 and (means_nothing or means_loopback):
            what = f"{machine.hostname} resolves its own name to {addresses or 'nothing'}, which others cannot reach"
            do = (
                f"rankwise does not use it; for MASTER_ADDR and --rendezvous give {use}, "
                f"or add '{use} {machine.hostname}' to its /etc/hosts"
            )
            found.append(CheckResult(check="own name", level=WARNING, what=what, do=do))
        elif means_nothing:
            what = f"{machine.hostname} cannot resolve its own name, which other programs may need"
            do = f"add '127.0.1.1 {machine.hostname}' to /etc/hosts"
            found.append(CheckResult(check="own name", level=WARNING, what=what, do=do))
        else:
            only_here = f" (with other machines, use {use})" if means_loopback else ""
            fine.append(f"{machine.hostname} is {addresses}{only_here}")
    return [*found, CheckResult(check="own name", level=OK, what="; ".join(fine))] if fine else found


def ports(job: ExaminedJob) -> list[CheckResult]:
    """Find hosts on which no port can be bound, or not the requested one."""
    found: list[CheckResult] = []
    for first, *_ in job.hosts:
        machine = first.machine
        if machine.free_port_error:
            what = f"no port can be bound on {machine.hostname}: {machine.free_port_error}"
            do = "cat /proc/sys/net/ipv4/ip_local_port_range; ss -s"
            found.append(CheckResult(check="ports", level=ERROR, what=what, do=do))
        if machine.port_error:
            what = f"port {machine.port} on {machine.hostname}: {machine.port_error}"
            do = f"ss -ltnp 'sport = :{machine.port}'; or give another port"
            found.append(CheckResult(check="ports", level=WARNING, what=what, do=do))
    if found:
        return found
    port = job.ranks[0].machine.port
    return [CheckResult(check="ports", level=OK, what=f"can be bound{f'; {port} is free' if port else ''}")]


def shared_memory(job: ExaminedJob) -> list[CheckResult]:
    """Find hosts with little shared memory, which loader workers pass samples through."""
    found: list[CheckResult] = []
    for first, *_ in job.hosts:
        machine = first.machine
        if machine.shared_memory_bytes < LEAST_SHARED_MEMORY_BYTES:
            size = f"has {machine.shared_memory_bytes // MIB} MiB" if machine.shared_memory_bytes else "does not exist"
            do = "docker run --shm-size=8g ... (or --ipc=host); Kubernetes: an emptyDir with medium Memory at /dev/shm"
            what = f"{SHARED_MEMORY} on {machine.hostname} {size}; loader workers may be killed by SIGBUS"
            found.append(CheckResult(check=SHARED_MEMORY, level=WARNING, what=what, do=do))
        elif machine.shared_memory_free_bytes < machine.shared_memory_bytes // 10:
            what = f"{SHARED_MEMORY} on {machine.hostname} has {machine.shared_memory_free_bytes // MIB} MiB left"
            found.append(CheckResult(check=SHARED_MEMORY, level=WARNING, what=what, do="ls -l /dev/shm"))
    if found:
        return found
    least = min(facts.machine.shared_memory_bytes for facts in job.ranks)
    return [CheckResult(check=SHARED_MEMORY, level=OK, what=f"{least / GIB:.1f} GiB or more on each host")]


def open_files(job: ExaminedJob) -> list[CheckResult]:
    """Find ranks that may run out of file descriptors."""
    needed = max(LEAST_OPEN_FILES, 2 * LEAST_PROCESSES + OPEN_FILES_PER_PEER * len(job.ranks))
    found: list[CheckResult] = []
    for first, *_ in job.hosts:
        machine = first.machine
        if machine.open_files_limit < needed:
            more = min(WANTED_OPEN_FILES, machine.open_files_hard_limit)
            what = f"{machine.open_files_limit} per process on {machine.hostname}; {needed} may be needed"
            do = f"ulimit -n {more}" if more >= needed else "raise it in /etc/security/limits.conf (nofile)"
            found.append(CheckResult(check="open files", level=WARNING, what=what, do=do))
    least = min(facts.machine.open_files_limit for facts in job.ranks)
    return found or [CheckResult(check="open files", level=OK, what=f"{least} or more per process")]


def processes(job: ExaminedJob) -> list[CheckResult]:
    """Find hosts whose limits may not allow ranks and their threads."""
    found: list[CheckResult] = []
    for ranks in job.hosts:
        machine = ranks[0].machine
        needed = LEAST_PROCESSES + PROCESSES_PER_RANK * len(ranks)
        if 0 <= machine.processes_limit < needed:
            what = f"{machine.processes_limit} processes and threads on {machine.hostname}; {needed} may be needed"
            do = "ulimit -u unlimited; docker run --pids-limit=-1; cat /sys/fs/cgroup/pids.max"
            found.append(CheckResult(check="processes", level=WARNING, what=what, do=do))
    return found or [CheckResult(check="processes", level=OK, what="the limit is high enough on each host")]


def threads(job: ExaminedJob) -> list[CheckResult]:
    """Find hosts whose ranks use more compute threads than there are cores."""
    found: list[CheckResult] = []
    for ranks in job.hosts:
        hostname = ranks[0].machine.hostname
        cores = {core for facts in ranks for core in facts.machine.cores}
        num_threads = sum(facts.machine.num_threads for facts in ranks)
        bound = [f for f in ranks if f.machine.num_threads > len(f.machine.cores)]
        if len(ranks) > 1 and num_threads > len(cores):
            what = f"{len(ranks)} ranks on {hostname} use {num_threads} compute threads on {len(cores)} cores"
            do = f"OMP_NUM_THREADS={max(len(cores) // len(ranks), 1)} (rankwise run sets it automatically)"
            # Fewer cores than ranks: the only fix is fewer ranks.
            if all(facts.machine.num_threads == 1 for facts in ranks):
                do = f"start at most {len(cores)} ranks there"
            found.append(CheckResult(check="threads", level=WARNING, what=what, do=do))
        elif bound:
            fewest = min(len(facts.machine.cores) for facts in bound)
            who = fold_ranks([facts.rank for facts in bound])
            what = f"{who} on {hostname} may use {fewest} core{'s' if fewest > 1 else ''} but uses more compute threads"
            do = f"OMP_NUM_THREADS={fewest}, or give each rank more cores (srun --cpus-per-task, mpirun --bind-to none)"
            found.append(CheckResult(check="threads", level=WARNING, what=what, do=do))
    first = job.ranks[0].machine
    what = f"{first.num_threads} per rank; {len(first.cores)} core{'s' if len(first.cores) > 1 else ''}"
    return found or [CheckResult(check="threads", level=OK, what=what)]


def clocks(job: ExaminedJob) -> list[CheckResult]:
    """Find hosts whose clock differs from rank 0's."""
    found: list[CheckResult] = []
    largest = 0.0
    for first, *_ in job.hosts:
        across = first.across
        if across is None or across.clock_ahead_seconds is None:
            continue
        # The error of the measurement is in the clock's favor.
        certain = max(abs(across.clock_ahead_seconds) - across.clock_error_seconds, 0.0)
        largest = max(largest, abs(across.clock_ahead_seconds))
        if certain > CLOCK_WARNING_SECONDS:
            way = "ahead of" if across.clock_ahead_seconds > 0 else "behind"
            what = f"{first.machine.hostname} is {abs(across.clock_ahead_seconds):.1f} s {way} rank 0's host"
            level = ERROR if certain > CLOCK_ERROR_SECONDS else WARNING
            found.append(CheckResult(check="clocks", level=level, what=what, do="timedatectl; chronyc tracking"))
    if found or len(job.hosts) == 1:
        return found
    return [CheckResult(check="clocks", level=OK, what=f"within {largest * 1000:.1f} ms of rank 0's")]


def shared_folder(job: ExaminedJob) -> list[CheckResult]:
    """Find hosts that do not see the shared folder."""
    if not job.shared_folder:
        return []
    found: list[CheckResult] = []
    for first, *_ in job.hosts:
        why = "" if first.across is None else first.across.shared_folder_error
        if why:
            what = f"{first.machine.hostname} does not share {job.shared_folder} with rank 0: {why}"
            do = f"on {first.machine.hostname}: findmnt -T {job.shared_folder}"
            found.append(CheckResult(check="shared folder", level=ERROR, what=what, do=do))
    num_hosts = len(job.hosts)
    what = f"{job.shared_folder} is seen by {'this host' if num_hosts == 1 else f'all {num_hosts} hosts'}"
    return found or [CheckResult(check="shared folder", level=OK, what=what)]


def all_reduce(job: ExaminedJob) -> list[CheckResult]:
    """Report how fast an all_reduce is; between hosts, find it slow."""
    if not job.timings:
        return []
    world_size = job.ranks[0].world_size
    told: list[str] = []
    slow = False
    for timing in job.timings:
        # The least that each rank sends for every byte of the tensor.
        bandwidth = timing.num_bytes * 2 * (world_size - 1) / world_size / max(timing.seconds, 1e-9)
        shown = f" ({bandwidth / 1e9:.2f} GB/s)" if timing.num_bytes >= LARGE_BYTES else ""
        told.append(f"{_size(timing.num_bytes)} {timing.seconds * 1000:.2f} ms{shown}")
        slow = timing.num_bytes >= LARGE_BYTES and bandwidth < SLOW_BYTES_PER_SECOND
    what = ", ".join(told)
    if slow and len(job.hosts) > 1:
        do = "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the fast network on every rank; ethtool <interface>"
        return [CheckResult(check="all_reduce", level=WARNING, what=f"slower than 1 Gbit/s: {what}", do=do)]
    return [CheckResult(check="all_reduce", level=OK, what=what)]


def values(job: ExaminedJob) -> list[CheckResult]:
    """Find ranks that receive wrong values, as through a broken connection between two GPUs."""
    if not job.timings:
        return []
    across = {facts.rank: facts.across for facts in job.ranks if facts.across is not None}
    told = [
        f"rank {rank} received wrong values from {fold_ranks(found.wrong_from)}"
        for rank, found in across.items()
        if found.wrong_from
    ]
    wrong = [rank for rank, found in across.items() if found.wrong_sum_bytes]
    if wrong:
        sizes = sorted({size for rank in wrong for size in across[rank].wrong_sum_bytes})
        told.append(f"all_reduce of {', '.join(map(_size, sizes))} gave {fold_ranks(wrong)} wrong values")
    do = (
        "NCCL_P2P_DISABLE=1 sends through host memory; if that helps, disable ACS and the IOMMU of these machines\n"
        "nvidia-smi topo -p2p r; dmesg | grep -i -e xid -e iommu; ethtool -S <interface>"
    )
    found = [CheckResult(check="values", level=ERROR, what=what, do=do) for what in told]
    return found or [CheckResult(check="values", level=OK, what="all_reduce and all_to_all are exact on every rank")]


CHECKS: Sequence[Callable[[ExaminedJob], list[CheckResult]]] = (
    versions,
    gpus,
    networks,
    store,
    own_names,
    ports,
    shared_memory,
    open_files,
    processes,
    threads,
    clocks,
    shared_folder,
    all_reduce,
    values,
)


def told_ranks(ranks: Sequence[Facts]) -> str:
    """Return the number of ranks and hosts, and what started the ranks."""
    if len(ranks) == 1 and ranks[0].world_size == 1:
        return f"this machine, {ranks[0].machine.hostname}"
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} of {ranks[0].world_size} alone, on {ranks[0].machine.hostname}"
    num_hosts = len({facts.machine.hostname for facts in ranks})
    of = "" if len(ranks) == ranks[0].world_size else f" of {ranks[0].world_size}"
    return f"{len(ranks)}{of} ranks on {num_hosts} host{'s' if num_hosts > 1 else ''}, started by {ranks[0].source}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // 1024} KiB"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
