# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job find each other: how they reach the store, and where each is.

Opens no process group and sets no variable; what it finds it returns.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError, PeerMissing, RankwiseError, fold_ranks, rank_prefix
from rankwise.log import log, warn
from rankwise.store.address_and_port import EVERY_INTERFACE
from rankwise.world import network

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.store.values import Store
    from rankwise.world.environments import Reading
    from rankwise.world.facts import World
    from rankwise.world.network import Route

LOOPBACK = "127.0.0.1"
ABSENT = "-"
"""Stands for the place of a rank that never joined."""
ENDED = "ended"
"""Stands for the place of a rank whose process has ended without an error before it joined; the launcher says so."""
LINGER_SECONDS = 2.0
"""How long the rank that serves the store stays for the others to read the last word."""
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
ATTEMPT_SECONDS = 5.0
"""How long one attempt to reach the store may take where nothing answers at all."""
NOTICE_SECONDS = 30.0
"""After how long a wait for other ranks to join is mentioned, with who is missing."""
QUIET_SECONDS = 15.0
"""How long a rank that cannot reach the store says nothing about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAddress:
    """Where a rank is."""

    hostname: str
    address: str | None
    """The address of its machine that the way to the store leads from; ``None`` on a machine without a network."""


def wait_for_store(reading: Reading, timeout_seconds: float) -> None:
    """Return when something listens at the address of the store.

    Raises:
        PeerMissing: nothing did within ``timeout_seconds``; says what was tried, and what the address is here.
    """
    if reading.address is None:
        return
    host, port = reading.address
    begun = time.monotonic()
    is_logged, pause = False, FIRST_PAUSE_SECONDS
    while True:
        left = begun + timeout_seconds - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(min(left, ATTEMPT_SECONDS), FIRST_PAUSE_SECONDS)):
                return
        except (OSError, UnicodeError) as error:
            last = str(error)
        waited = time.monotonic() - begun
        if waited >= timeout_seconds:
            raise _unreachable(reading, last, timeout_seconds)
        if waited >= QUIET_SECONDS and not is_logged:
            is_logged = True
            log(f"rank {reading.rank} still waits for the job's store at {host}, port {port}: {last}", all_ranks=True)
        time.sleep(min(pause, max(timeout_seconds - waited, 0)))
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)


def _unreachable(reading: Reading, last: str, timeout_seconds: float) -> PeerMissing:
    host, port = reading.address or ("", 0)
    evidence = [f"last attempt: {last}", *_way_to(host, port), reading.reason]
    do = [f"on rank 0's machine: rankwise doctor; here: nc -vz {host} {port}"]
    if evidence_of_loopback(host):
        do.insert(0, "give every rank an address of rank 0's machine (MASTER_ADDR), not a name that means loopback")
    return PeerMissing(
        f"The job's store at {host}, port {port}, could not be reached within {timeout_seconds:.0f} s.",
        ranks=[0],
        where=rank_prefix(reading.rank, reading.world_size, socket.gethostname()),
        evidence="\n".join(evidence),
        do="\n".join([*do, "start rank 0 too; where that takes longer, join(timeout_seconds=...)"]),
    )


def evidence_of_loopback(host: str) -> list[str]:
    """Return what says that a host means loopback here: its addresses, and lines of ``/etc/hosts``."""
    try:
        addresses = network.resolve(host)
    except ConfigurationError:
        return []
    if not all(network.is_loopback(address) for address in addresses):
        return []
    found = f"{host} means this machine itself here: {', '.join(addresses)}"
    return [found, *(f"{network.HOSTS_FILE} says: {line}" for line in network.hosts_file_lines(host))]


def _way_to(host: str, port: int) -> list[str]:
    loopback = evidence_of_loopback(host)
    if loopback:
        return loopback
    try:
        route = network.route_to(host, port)
    except ConfigurationError as error:
        return [error.what, *(error.evidence or "").splitlines()]
    return [f"way there: {route.remote_address} from {route.local_address} through {route.interface}"]


def own_rank_address(store_host: str | None) -> RankAddress:
    """Return where this rank is, as other machines may reach it.

    Args:
        store_host: where the store is; ``None`` where it is a file.
    """
    route = route_beyond_loopback(store_host)
    return RankAddress(
        hostname=socket.gethostname(), address=network.main_address() if route is None else route.local_address
    )


def route_beyond_loopback(store_host: str | None) -> Route | None:
    """Return the way to the store, or ``None`` where there is none or it says nothing about other machines."""
    if store_host is None:
        return None
    try:
        route = network.route_to(store_host)
    except ConfigurationError:
        return None
    return None if network.is_loopback(route.local_address) else route


def exchange_rank_addresses(store: Store, reading: Reading, timeout_seconds: float) -> list[RankAddress]:
    """Return where every rank is, by rank; the first place where a rank that never starts is noticed.

    Called by: every rank.

    Raises:
        PeerMissing: some did not come within ``timeout_seconds``.
    """
    keys = [rank_address_key(rank) for rank in range(reading.world_size)]
    own = own_rank_address(None if reading.address is None else reading.address[0])
    store.set_if_absent(keys[reading.rank], json.dumps(asdict(own)))
    with contextlib.suppress(TimeoutError):
        _wait_for_addresses(store, keys, timeout_seconds)
    # Whoever waited in vain writes the absent down, so that every rank ends with the same words.
    for key in keys:
        store.set_if_absent(key, ABSENT)
    texts = [store.get(key, timeout_seconds).decode() for key in keys]
    missing = [rank for rank, text in enumerate(texts) if text in {ABSENT, ENDED}]
    if missing:
        _wait_for_readers(store, reading, len(texts) - len(missing))
        ended = [rank for rank in missing if texts[rank] == ENDED]
        raise _ended_before(reading, ended) if ended else _never_joined(reading, missing, timeout_seconds)
    return [RankAddress(**json.loads(text)) for text in texts]


def _wait_for_addresses(store: Store, keys: Sequence[str], timeout_seconds: float) -> None:
    """Return when every place is there; after a while one of the ranks that wait says whose are not."""
    try:
        store.wait(keys, min(NOTICE_SECONDS, timeout_seconds))
    except TimeoutError:
        if timeout_seconds <= NOTICE_SECONDS:
            raise
        missing = [rank for rank, key in enumerate(keys) if not store.check(key)]
        if missing and store.add("rankwise/claims/join", 1) == 1:
            who = fold_ranks(missing)
            warn(
                f"join() has been waiting for {NOTICE_SECONDS:.0f} s for {who}: not started, or not come to "
                "rankwise.join() yet; under `rankwise run`, `rankwise stacks` shows where each rank is",
                all_ranks=True,
            )
        store.wait(keys, timeout_seconds - NOTICE_SECONDS)


def rank_address_of(store: Store, rank: int) -> RankAddress:
    """Return where a rank of a world that has been joined is."""
    return RankAddress(**json.loads(store.get(rank_address_key(rank), LINGER_SECONDS)))


def address_on_job(store: Store, world: World) -> str:
    """Return the address that other ranks reach this one at: of its machine's way to the store, as join found it."""
    if world.num_nodes == 1:
        return LOOPBACK
    return rank_address_of(store, world.rank).address or EVERY_INTERFACE


def rank_address_key(rank: int) -> str:
    """Return the key of where a rank of a world is, among those of the world."""
    return f"rankwise/places/{rank}"


def _wait_for_readers(store: Store, reading: Reading, num_readers: int) -> None:
    """Stay until the others have read why, where this process may be the one that serves the store."""
    if store.add("rankwise/absence_read", 1) == num_readers:
        store.set("rankwise/absence_read_by_all", "")
    if reading.rank == 0:
        with contextlib.suppress(TimeoutError):
            store.wait(["rankwise/absence_read_by_all"], LINGER_SECONDS)


def _ended_before(reading: Reading, ended: list[int]) -> RankwiseError:
    have = "has" if len(ended) == 1 else "have"
    return PeerMissing(
        f"join() cannot complete: {fold_ranks(ended)} {have} ended without an error and without joining.",
        ranks=ended,
        where=rank_prefix(reading.rank, reading.world_size, socket.gethostname()),
        evidence=reading.reason,
        do="have every rank call rankwise.join() before its script can end",
    )


def _never_joined(reading: Reading, missing: list[int], timeout_seconds: float) -> RankwiseError:
    return PeerMissing(
        f"join() waited {timeout_seconds:.0f} s for {fold_ranks(missing)} in vain.",
        ranks=missing,
        where=rank_prefix(reading.rank, reading.world_size, socket.gethostname()),
        evidence=reading.reason,
        do="start every rank; where that takes longer, join(timeout_seconds=...)",
    )
