# SPDX-License-Identifier: Apache-2.0
"""Examining this machine, or every rank of a job: join, gather facts, and have rank 0 evaluate them.

What a process sees of its machine alone, and what ranks determine together: routes between hosts, clocks, a shared
folder, an all_reduce's time and values. Facts travel through the job's store as JSON. Writes nothing but one file into
the folder that must be shared, and removes it. Imported by ``cli``.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import socket
import statistics
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rankwise.comm.collectives import all_reduce, all_to_all
from rankwise.comm.join import join
from rankwise.comm.leave import fail, leave
from rankwise.comm.session import current
from rankwise.doctor.checks import ERROR, LARGE_BYTES, CheckResult, judge
from rankwise.doctor.facts import Across, ExaminedJob, Facts, Machine, Timing
from rankwise.errors import ConfigurationError, PeerMissing, RankwiseError, fold_ranks
from rankwise.insight.measuring import measure_clock
from rankwise.launch.messages import value_of
from rankwise.version import VERSION
from rankwise.world import network
from rankwise.world.device import accelerator
from rankwise.world.device.choice import backend_of, known_backends
from rankwise.world.environments.process import explain_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.comm.session import Session
    from rankwise.store.client import Store
    from rankwise.world.environments.reading import Reading
    from rankwise.world.facts import World

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - its size is looked at
NO_LIMIT = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """The result, on one rank."""

    job: ExaminedJob
    """On ranks other than 0, of this rank only."""
    findings: tuple[CheckResult, ...]
    speaks: bool
    """Whether this rank prints it: rank 0, and any rank that could not report to rank 0."""


def examine(*, timeout_seconds: float, port: int = 0, shared_folder: str = "") -> Examination:
    """Examine this machine or, if a launcher started several ranks, all of their machines together.

    Called by: every rank.

    Args:
        timeout_seconds: how long to wait for the other ranks, at each step.
        port: a port that must be free on this machine; checked only if no rank was started.
        shared_folder: a folder that every host must see; empty skips the check.
    """
    explanation = explain_process()
    reading = explanation.decided
    if reading is None or reading.world_size == 1:
        source = "nobody" if reading is None else reading.source
        facts = Facts(rank=0, world_size=1, source=source, machine=examined_machine(port))
        across = Across(shared_folder_error=folder_error(shared_folder) if shared_folder else "")
        job = ExaminedJob(ranks=(replace(facts, across=across),), shared_folder=shared_folder)
        found = judge(job)
        if reading is None:
            what = f"cannot tell what started this process: {str(explanation.error).splitlines()[0]}"
            found.insert(0, CheckResult(check="launcher", level=ERROR, what=what, do="rankwise env"))
        return Examination(job=job, findings=tuple(found), speaks=True)
    return _examine_job(reading, timeout_seconds, shared_folder)


def _examine_job(reading: Reading, timeout_seconds: float, shared_folder: str) -> Examination:
    address = reading.address
    own = Facts(
        rank=reading.rank,
        world_size=reading.world_size,
        source=reading.source,
        store="" if address is None else f"{address[0]} port {address[1]}",
        machine=examined_machine(),
    )
    alone = ExaminedJob(ranks=(own,), shared_folder="")
    try:
        world = join(timeout_seconds=timeout_seconds)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what was looked for
        speaks = reading.rank == 0 or not isinstance(error, PeerMissing) or 0 in error.ranks
        return Examination(job=alone, findings=(_told("join", error), *judge(alone)), speaks=speaks)
    try:
        job, missing = gather_job(current(), own, timeout_seconds, shared_folder)
    except Exception as error:  # noqa: BLE001 - as above
        fail(error)
        return Examination(job=alone, findings=(_told("answers", error), *judge(alone)), speaks=world.rank == 0)
    leave()
    return Examination(job=job, findings=(*missing, *judge(job)), speaks=world.rank == 0)


def _told(check: str, error: Exception) -> CheckResult:
    if isinstance(error, RankwiseError):
        return CheckResult(check=check, level=ERROR, what=error.what, do=error.do or "", evidence=error.evidence or "")
    what = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    do = "nft list ruleset\nevery host must accept connections from the others on all ports: Gloo and NCCL choose them"
    return CheckResult(check=check, level=ERROR, what=what, do=do)


# -- alone ---------------------------------------------------------------------------------------------------


def examined_machine(port: int = 0) -> Machine:
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


# -- together ------------------------------------------------------------------------------------------------

TIMED_BYTES = (4 * 2**10, 2**20, 25 * 2**20)
NUM_TIMED = {4 * 2**10: 20, 2**20: 5, 25 * 2**20: 3}
PAIRS_BYTES = 2**20
"""What each rank sends to all others together, to compare what arrives."""
SHARE_OF_TIMEOUT = 4
"""A size that would take more than this fraction of the time limit is skipped."""
NEW_FILE_SECONDS = 3.0
NEW_FILE_POLL_SECONDS = 0.1
"""A network file system may show a new file late."""


def gather_job(
    session: Session, own: Facts, timeout_seconds: float, shared_folder: str
) -> tuple[ExaminedJob, list[CheckResult]]:
    """Gather all facts, and return them on rank 0; elsewhere only this rank's.

    Called by: every rank.

    Args:
        session: the open session.
        own: what this rank knows of its machine.
        timeout_seconds: how long to wait for the others, at each step.
        shared_folder: a folder that every host must see, or empty.

    Raises:
        TimeoutError: a rank did not answer in time.
        RankwiseError: another rank failed.
    """
    world = session.world
    if session.store is None:
        return ExaminedJob(ranks=(own,)), []
    store = session.store.prefixed("doctor")
    store.set(f"machine/{world.rank}", json.dumps(asdict(own.machine)))
    ranks: list[Facts] = [own]
    if world.rank == 0:
        texts = _collect(store, "machine", world.world_size, timeout_seconds)
        machines = {rank: value_of(Machine, json.loads(text)) for rank, text in sorted(texts.items())}
        ranks = [replace(own, rank=rank, machine=machine) for rank, machine in machines.items()]
        store.set("first_of_host", json.dumps(_first_of_host(ranks)))
        store.set("addresses", json.dumps(_addresses(ranks)))
    first_of_host: dict[str, int] = json.loads(store.get("first_of_host", timeout_seconds))
    addresses: dict[str, str] = json.loads(store.get("addresses", timeout_seconds))
    found = Across(store_route=_store_route(own.store))
    is_first = first_of_host.get(own.machine.hostname) == world.rank
    if is_first:
        others = {name: address for name, address in addresses.items() if name != own.machine.hostname}
        found = _with_routes(found, others)
    found = _with_clock(found, store, world.rank, first_of_host, timeout_seconds)
    with _shared_file(store, world.rank, shared_folder, timeout_seconds) as path:
        if is_first and path:
            found = replace(found, shared_folder_error=_sees(path))
        timings, wrong_sum_bytes = _timings(world, timeout_seconds)
        found = replace(found, wrong_sum_bytes=wrong_sum_bytes, wrong_from=_wrong_from(world))
        store.set(f"across/{world.rank}", json.dumps(asdict(found)))
        if world.rank != 0:
            # Rank 0 removes its file only after every host has looked.
            return ExaminedJob(ranks=(replace(own, across=found),), shared_folder=shared_folder), []
        texts = _collect(store, "across", world.world_size, timeout_seconds)
    ranks = [
        replace(facts, across=value_of(Across, json.loads(texts[facts.rank]))) if facts.rank in texts else facts
        for facts in ranks
    ]
    missing = [rank for rank in range(world.world_size) if rank not in texts]
    findings = []
    if missing:
        what = f"{fold_ranks(missing)} did not answer within {timeout_seconds:.0f} s"
        findings = [CheckResult(check="answers", level=ERROR, what=what, do="run rankwise stacks, or raise --timeout")]
    return ExaminedJob(ranks=tuple(ranks), timings=tuple(timings), shared_folder=shared_folder), findings


def _collect(store: Store, what: str, world_size: int, timeout_seconds: float) -> dict[int, bytes]:
    """Return what every rank has set, by rank; without ranks that exceeded the limit."""
    keys = {rank: f"{what}/{rank}" for rank in range(world_size)}
    with contextlib.suppress(TimeoutError):
        store.wait(list(keys.values()), timeout_seconds)
    return {rank: store.get(key, timeout_seconds) for rank, key in keys.items() if store.check(key)}


def _first_of_host(ranks: list[Facts]) -> dict[str, int]:
    return {facts.machine.hostname: facts.rank for facts in reversed(ranks)}


def _addresses(ranks: list[Facts]) -> dict[str, str]:
    """Return an address of each host that has one."""
    return {f.machine.hostname: f.machine.own_addresses[0] for f in ranks if f.machine.own_addresses}


def _store_route(store: str) -> network.Route | None:
    try:
        return network.route_to(store.split(maxsplit=1)[0]) if store else None
    except ConfigurationError:
        return None


def _with_routes(found: Across, others: dict[str, str]) -> Across:
    routes: dict[str, network.Route] = {}
    no_routes: dict[str, str] = {}
    for hostname, address in others.items():
        try:
            routes[hostname] = network.route_to(address)
        except ConfigurationError as error:
            no_routes[hostname] = (error.evidence or error.what).splitlines()[0]
    return replace(found, routes=routes, no_routes=no_routes)


def _with_clock(
    found: Across, store: Store, rank: int, first_of_host: dict[str, int], timeout_seconds: float
) -> Across:
    """Have the first rank of each host compare its clock with rank 0's, one host after the other."""
    asking = [first for first in first_of_host.values() if first != 0]
    measured = measure_clock(store.prefixed("clock"), rank, asking, time.time, timeout_seconds)
    if measured is None:
        return found
    error, ahead = measured
    return replace(found, clock_ahead_seconds=ahead, clock_error_seconds=error)


class _shared_file:  # noqa: N801 - reads as a word in `with _shared_file(...)`
    """A file that rank 0 writes into the shared folder, which exists until rank 0 leaves the block."""

    def __init__(self, store: Store, rank: int, folder: str, timeout_seconds: float) -> None:
        self._store, self._rank, self._folder, self._timeout_seconds = store, rank, folder, timeout_seconds
        self._path: Path | None = None

    def __enter__(self) -> str:
        """Return the path on rank 0; empty if there is no folder to check."""
        if not self._folder:
            return ""
        if self._rank == 0:
            path = Path(self._folder).absolute() / f".rankwise-doctor-{uuid.uuid4().hex}"
            with contextlib.suppress(OSError):
                path.write_text(path.name, encoding="ascii")
                self._path = path
            self._store.set("shared_file", str(path))
        return self._store.get("shared_file", self._timeout_seconds).decode()

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _sees(path: str) -> str:
    """Return why a file that rank 0 wrote is not seen here, or an empty text if it is."""
    deadline = time.monotonic() + NEW_FILE_SECONDS
    while True:
        try:
            text = Path(path).read_text(encoding="ascii")
        except OSError as error:
            why = str(error.strerror)
        else:
            return "" if text == Path(path).name else "the file there is a different one"
        if time.monotonic() > deadline:
            return why
        time.sleep(NEW_FILE_POLL_SECONDS)


def folder_error(folder: str) -> str:
    """Return why a folder is not writable, or an empty text if it is."""
    path = Path(folder) / f".rankwise-doctor-{uuid.uuid4().hex}"
    try:
        path.write_text("", encoding="ascii")
        path.unlink()
    except OSError as error:
        return str(error.strerror)
    return ""


def _timings(world: World, timeout_seconds: float) -> tuple[list[Timing], tuple[int, ...]]:
    """Return how long an all_reduce takes, for sizes that fit into the time, and the sizes with wrong values here.

    Called by: every rank.
    """
    timings: list[Timing] = []
    wrong: list[int] = []
    size = world.world_size
    for num_bytes in TIMED_BYTES:
        values = _values(num_bytes // 4)
        tensor = (values + world.rank).to(world.device)
        if timings and timings[-1].num_bytes >= LARGE_BYTES:  # a small tensor's time does not predict a large one's
            expected = timings[-1].seconds * num_bytes / timings[-1].num_bytes
            if expected * (1 + NUM_TIMED[num_bytes]) > timeout_seconds / SHARE_OF_TIMEOUT:
                break
        total = all_reduce(tensor)  # the first call sets up connections and memory
        # Sums of small integers, exact in any order.
        if not torch.equal(total.cpu(), values * size + size * (size - 1) // 2):
            wrong.append(num_bytes)
        took = [_seconds(lambda tensor=tensor: all_reduce(tensor), world.device) for _ in range(NUM_TIMED[num_bytes])]
        # The slowest rank's, so that all ranks decide the same about the next size.
        timings.append(Timing(num_bytes=num_bytes, seconds=all_reduce(statistics.median(took), "max")))
    return timings, tuple(wrong)


def _wrong_from(world: World) -> tuple[int, ...]:
    """Return the ranks whose tensors arrive here with wrong values. Devices exchange them pair by pair.

    Called by: every rank.
    """
    ranks = range(world.world_size)
    values = _values(max(PAIRS_BYTES // 4 // world.world_size, 1))
    received = all_to_all([(values + world.rank - rank).to(world.device) for rank in ranks])
    return tuple(rank for rank in ranks if not torch.equal(received[rank].cpu(), values + rank - world.rank))


def _values(number: int) -> torch.Tensor:
    return torch.arange(number) % 127 + 0.0


def _seconds(action: Callable[[], object], device: str) -> float:
    begun = time.perf_counter()
    action()
    accelerator.synchronize(device)
    return time.perf_counter() - begun
