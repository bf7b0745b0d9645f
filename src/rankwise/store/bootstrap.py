# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job find each other: where rank 0 serves the store, how they reach it, and the address of each.

The port is the one of the reading, chosen by a launcher, the user or Slurm's job number; where there is none,
the kernel chooses one and rank 0 publishes it in a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from dataclasses import asdict, dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rankwise.errors import ConfigurationError, PeerMissing, RankwiseError, fold_ranks, rank_prefix
from rankwise.log import log, warn
from rankwise.store import opening
from rankwise.world import network
from rankwise.world.device.choice import Sight, refuse_unequipped
from rankwise.world.environments.process import EXPLICIT, in_kubernetes
from rankwise.world.environments.table import row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.store.client import Store
    from rankwise.world.environments.reading import Reading
    from rankwise.world.facts import World
    from rankwise.world.network import Route

LOOPBACK = "127.0.0.1"
EVERY_INTERFACE = "0.0.0.0"  # noqa: S104 - where others come from is not known
ABSENT = "-"
"""Stands for the address of a rank that never joined."""
ENDED = "ended"
"""Stands for the address of a rank whose process exited without an error before it joined; set by the launcher."""
LINGER_SECONDS = 2.0
"""How long the rank that serves the store keeps running so that the others can read the final verdict."""
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
REACH_ATTEMPT_SECONDS = 5.0
"""How long one attempt to reach the store may take if nothing answers."""
NOTICE_SECONDS = 30.0
"""After how long a wait for other ranks to join is logged, with the missing ranks."""
QUIET_SECONDS = 15.0
"""How long a rank that cannot reach the store logs nothing about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAddress:
    """Where a rank is."""

    hostname: str
    address: str | None
    """The address its machine uses on the route to the store; ``None`` on a machine without a network."""
    sight: Sight = field(default_factory=Sight, compare=False)
    """What it sees of the devices of its machine."""


def open_store(reading: Reading, timeout_seconds: float) -> tuple[Store, bool]:
    """Return the job's store and whether this process serves it. Called by: every rank.

    Raises:
        ConfigurationError: it cannot be served at its address.
        PeerMissing: it could not be reached within ``timeout_seconds``.
        NotRankwise, SecretRefused: another program listens at its address, or one with another secret.
    """
    secret = secret_of(reading)
    if reading.file is not None:
        return opening.open_file(reading.file, reading.world_size), False
    if reading.address is None:
        # Ranks of one machine.
        path = _published_path(reading)
        if reading.rank == 0:
            return opening.serve_published(path, secret), True
        try:
            return opening.connect_published(path, timeout_seconds, secret), False
        except TimeoutError as error:
            raise _unpublished(reading, str(error), timeout_seconds) from None
    host, port = reading.address
    serves = reading.rank == 0 and not reading.store_is_served
    if serves:
        address, words = listening_address(reading, in_kubernetes=in_kubernetes())
        opened, _ = opening.serve(address, port, secret=secret)
        if words:
            log(words)
    else:
        opened = _reach(reading, host, port, timeout_seconds)
    return opened.prefixed(f"attempt/{reading.attempt}"), serves


def _reach(reading: Reading, host: str, port: int, timeout_seconds: float) -> Store:
    """Return a connection to a store that another process serves."""
    secret = secret_of(reading)
    if reading.store_is_served and secret is not None:
        # It has been there longer than this rank: no other connection need look first.
        with contextlib.suppress(TimeoutError):
            return opening.connect(host, port, min(timeout_seconds, REACH_ATTEMPT_SECONDS), secret=secret)
    wait_for_store(reading, timeout_seconds)
    try:
        return opening.connect(host, port, timeout_seconds, secret=secret)
    except TimeoutError as error:
        raise _unreachable(reading, str(error), timeout_seconds) from None


def forget_port(reading: Reading) -> None:
    """Remove the file of a published port: every rank has connected, or never will. Called by: the serving rank."""
    if reading.address is None:
        _published_path(reading).unlink(missing_ok=True)


def _published_path(reading: Reading) -> Path:
    return Path(tempfile.gettempdir()) / f"rankwise-{os.getuid()}-{reading.job_key}"


def secret_of(reading: Reading) -> bytes | None:
    """Return the job's secret; ``None`` if it has none."""
    # A variable may hold bytes that are not valid text; they are restored as they were.
    return None if reading.secret is None else reading.secret.encode(errors="surrogateescape")


def listening_address(reading: Reading, *, in_kubernetes: bool) -> tuple[str, str | None]:
    """Return the address rank 0 serves the store on, and a log line if it is not the expected one.

    Listens only on the address the others were given, if this machine has it. If not (the name means loopback on
    this machine, as in Debian's ``/etc/hosts`` and with Kubernetes operators; it belongs to a Kubernetes service),
    listens on every interface.

    Args:
        reading: what started this process; it holds the address.
        in_kubernetes: whether this process runs in a pod, where an address may be a service's.

    Raises:
        ConfigurationError: the address belongs to another machine.
    """
    if reading.address is None:
        raise ConfigurationError("No address is given to serve the store on.", evidence=reading.reason)
    host, port = reading.address
    try:
        addresses = network.resolve(host)
    except ConfigurationError:
        if not in_kubernetes:
            raise
        addresses = []  # a service's name, which resolves everywhere once this pod is ready
    own = [address for address in addresses if network.is_own(address)]
    if not own:
        if in_kubernetes:
            return EVERY_INTERFACE, _open_note(port, f"{host} is not an address of this pod, but probably of a service")
        raise _not_here(host, addresses)
    if reading.is_one_machine:
        return own[0], None
    if len(own) == 1 and not network.is_loopback(own[0]):
        return own[0], None
    elsewhere = in_kubernetes or (reading.num_nodes or 1) > 1 or reading.local_world_size is not None
    # localhost is taken literally, unless ranks are known to be elsewhere and were given another address.
    if host in {"localhost", own[0]} and (reading.source == EXPLICIT or not elsewhere):
        return own[0], None
    return EVERY_INTERFACE, _open_note(port, f"{host} resolves to {', '.join(own)} on this machine, but not on others")


def _open_note(port: int, why: str) -> str:
    return f"the job's store listens on every interface, port {port}: {why}"


def _not_here(host: str, addresses: Sequence[str]) -> ConfigurationError:
    own = network.own_addresses()
    return ConfigurationError(
        f"Rank 0 must serve the job's store at {host}, which is not an address of its machine.",
        where=socket.gethostname(),
        evidence="\n".join([f"{host} is {', '.join(addresses)}", *network.interface_lines()]),
        do=f"give every rank rank 0's address: MASTER_ADDR={own[0] if own else '<its address>'} (or init_method), "
        f"or start rank 0 on {host}",
    )


def wait_for_store(reading: Reading, timeout_seconds: float) -> None:
    """Wait until something listens at the address of the store.

    Raises:
        PeerMissing: nothing did within ``timeout_seconds``; shows the last attempt and how the address resolves.
    """
    if reading.address is None:
        return
    host, port = reading.address
    begun = time.monotonic()
    is_logged, pause = False, FIRST_PAUSE_SECONDS
    while True:
        left = begun + timeout_seconds - time.monotonic()
        try:
            with socket.create_connection(
                (host, port), timeout=max(min(left, REACH_ATTEMPT_SECONDS), FIRST_PAUSE_SECONDS)
            ):
                return
        except (OSError, UnicodeError) as error:
            last = str(error)
        waited = time.monotonic() - begun
        if waited >= timeout_seconds:
            raise _unreachable(reading, last, timeout_seconds)
        if waited >= QUIET_SECONDS and not is_logged:
            is_logged = True
            log(f"rank {reading.rank} is waiting for the job's store at {host}, port {port}: {last}", all_ranks=True)
        time.sleep(min(pause, max(timeout_seconds - waited, 0)))
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)


def _unreachable(reading: Reading, last: str, timeout_seconds: float) -> PeerMissing:
    host, port = reading.address or ("", 0)
    evidence = [f"last attempt: {last}", *_way_to(host, port), reading.reason]
    do = [f"on rank 0's machine: rankwise doctor; here: nc -vz {host} {port}"]
    if evidence_of_loopback(host):
        do.insert(0, "set MASTER_ADDR on every rank to an address of rank 0's machine, not a name for loopback")
    return PeerMissing(
        f"The job's store at {host}, port {port}, could not be reached within {timeout_seconds:.0f} s.",
        ranks=[0],
        where=rank_prefix(reading.rank, reading.world_size, socket.gethostname()),
        evidence="\n".join(evidence),
        do="\n".join([*do, "start rank 0 too; if that takes longer, pass join(timeout_seconds=...)"]),
    )


def _unpublished(reading: Reading, last: str, timeout_seconds: float) -> PeerMissing:
    return PeerMissing(
        f"Rank 0 did not join on this machine within {timeout_seconds:.0f} s.",
        ranks=[0],
        where=rank_prefix(reading.rank, reading.world_size, socket.gethostname()),
        evidence=f"{last}\n{reading.reason}",
        do="start rank 0 too; if that takes longer, pass join(timeout_seconds=...)\n"
        f"if it does not share {tempfile.gettempdir()} with this rank, as in a container of its own: "
        f"{row(reading.source).set_address}",
    )


def evidence_of_loopback(host: str) -> list[str]:
    """Return the evidence that a host resolves to loopback here: its addresses, and lines of ``/etc/hosts``."""
    try:
        addresses = network.resolve(host)
    except ConfigurationError:
        return []
    if not all(network.is_loopback(address) for address in addresses):
        return []
    found = f"on this machine, {host} resolves to the machine itself: {', '.join(addresses)}"
    return [found, *(f"{network.HOSTS_FILE} has: {line}" for line in network.hosts_file_lines(host))]


def _way_to(host: str, port: int) -> list[str]:
    loopback = evidence_of_loopback(host)
    if loopback:
        return loopback
    try:
        route = network.route_to(host, port)
    except ConfigurationError as error:
        return [error.what, *(error.evidence or "").splitlines()]
    return [f"route: {route.remote_address} from {route.local_address} through {route.interface}"]


def own_rank_address(store_host: str | None, sight: Sight) -> RankAddress:
    """Return the address at which other machines may reach this rank; a store in a file has no ``store_host``."""
    route = route_beyond_loopback(store_host)
    return RankAddress(
        hostname=socket.gethostname(),
        address=network.main_address() if route is None else route.local_address,
        sight=sight,
    )


def _from_text(text: str | bytes) -> RankAddress:
    return _address_from(json.loads(text))


def _address_from(found: dict[str, Any]) -> RankAddress:
    return RankAddress(hostname=found["hostname"], address=found["address"], sight=Sight(**found["sight"]))


def route_beyond_loopback(store_host: str | None) -> Route | None:
    """Return the route to the store, or ``None`` if there is none or it does not lead to other machines."""
    if store_host is None:
        return None
    try:
        route = network.route_to(store_host)
    except ConfigurationError:
        return None
    return None if network.is_loopback(route.local_address) else route


# -- where every rank is --------------------------------------------------------------------------------
#
# Each rank stores its address and counts itself. The last one to arrive reads all addresses, once for all, and stores
# for each host what its ranks need: a rank reads as much in a job of ten thousand ranks as in one of ten.


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """What a rank knows of where the others are."""

    on_host: dict[int, RankAddress]
    """The ranks of its host, itself among them, by rank."""
    node_rank: int = 0
    """The number of its host, in the order of their first ranks."""
    num_nodes: int = 1
    elsewhere: tuple[str, ...] = ()
    """Addresses of a few other hosts."""
    unequipped: tuple[tuple[str, dict[int, Sight]], ...] = ()
    """The first hosts, if any, on which a rank has no device, or the one of another rank; with what its ranks see."""


class SharedKeys(Protocol):
    """What the addresses are read from, and the result is written to: a store, or the keys in the serving process."""

    def set(self, key: str, value: str) -> None:
        """Set ``key``."""
        ...

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are set."""
        ...


ARRIVED_KEY = "rankwise/arrived"
"""Counts the ranks that have stored their address, and those that never will."""
_MISSING_KEY = "rankwise/missing"
_HOSTS_KEY = "rankwise/hosts"
_MOST_ELSEWHERE = 3
_CONCLUDE_SECONDS = 10.0
"""How long the rank that names the missing ones for all may take."""


def exchange_rank_addresses(store: Store, reading: Reading, timeout_seconds: float, sight: Sight) -> Neighbours:
    """Return what this rank needs to know of the others; the first point where a rank that never starts is noticed.

    Called by: every rank, with what it sees of the devices of its machine.

    Raises:
        PeerMissing: some ranks did not join within ``timeout_seconds``.
    """
    own = own_rank_address(None if reading.address is None else reading.address[0], sight)
    text = json.dumps(asdict(own))
    answer = _neighbours_key(own.hostname)
    if store.held_or_set(rank_address_key(reading.rank), text) != text.encode():
        answer = _MISSING_KEY  # The others have stopped waiting.
    elif store.add(ARRIVED_KEY, 1) == reading.world_size:
        conclude(store, reading.world_size)
    try:
        found = _wait_for_answer(store, answer, reading.world_size, timeout_seconds)
    except TimeoutError:
        # One rank names the missing ones for all, so that every rank raises the same error.
        if store.add("rankwise/claims/missing", 1) == 1:
            _give_up_missing(store, reading.world_size)
        found = store.get(answer, _CONCLUDE_SECONDS)
    told = json.loads(found)
    if "missing" in told:
        missing = {int(rank): why for rank, why in told["missing"].items()}
        _wait_for_readers(store, reading, reading.world_size - len(missing))
        ended = [rank for rank, why in missing.items() if why == ENDED]
        raise _ended_before(reading, ended) if ended else _never_joined(reading, sorted(missing), timeout_seconds)
    return _neighbours_from(told)


def _wait_for_answer(store: Store, key: str, world_size: int, timeout_seconds: float) -> bytes:
    """Return the value of ``key``; after a while one of the waiting ranks logs which ranks are missing."""
    try:
        return store.get(key, min(NOTICE_SECONDS, timeout_seconds))
    except TimeoutError:
        if timeout_seconds <= NOTICE_SECONDS:
            raise
    if store.add("rankwise/claims/join", 1) == 1:
        missing = _missing_now(store, world_size)
        if missing:
            warn(
                f"join() has been waiting for {NOTICE_SECONDS:.0f} s for {fold_ranks(missing)}: not started, or not "
                "yet at rankwise.join(); under `rankwise run`, `rankwise stacks` shows where each rank is",
                all_ranks=True,
            )
        else:
            # The last one to arrive was killed before it did this, or is about to: both store the same.
            conclude(store, world_size)
    return store.get(key, timeout_seconds - NOTICE_SECONDS)


def _missing_now(store: Store, world_size: int) -> list[int]:
    keys = [rank_address_key(rank) for rank in range(world_size)]
    there = store.peek_all(keys)
    return [rank for rank, key in enumerate(keys) if key not in there]


def _give_up_missing(store: Store, world_size: int) -> None:
    for rank in _missing_now(store, world_size):
        store.set_if_absent(rank_address_key(rank), ABSENT)
    conclude(store, world_size)


def conclude(store: SharedKeys, world_size: int) -> None:
    """Store for the ranks of each host what they need, or which ranks are missing. Every rank has a value by now."""
    texts = [text.decode() for text in store.get_all([rank_address_key(rank) for rank in range(world_size)])]
    missing = {str(rank): text for rank, text in enumerate(texts) if text in {ABSENT, ENDED}}
    addresses = {rank: _from_text(text) for rank, text in enumerate(texts) if text not in {ABSENT, ENDED}}
    if missing:
        verdict = json.dumps({"missing": missing})
        store.set(_MISSING_KEY, verdict)
        for hostname in {place.hostname for place in addresses.values()}:
            store.set(_neighbours_key(hostname), verdict)
        return
    hosts = neighbours_by_host(list(addresses.values()))
    runs = [[name, len(list(ranks))] for name, ranks in groupby(place.hostname for place in addresses.values())]
    store.set(_HOSTS_KEY, json.dumps(runs))
    for hostname, neighbours in hosts.items():
        store.set(_neighbours_key(hostname), json.dumps(asdict(neighbours)))


def neighbours_by_host(addresses: Sequence[RankAddress]) -> dict[str, Neighbours]:
    """Return what the ranks of each host need, from the addresses of all ranks."""
    hosts: dict[str, dict[int, RankAddress]] = {}
    for rank, place in enumerate(addresses):
        hosts.setdefault(place.hostname, {})[rank] = place
    unequipped: list[tuple[str, dict[int, Sight]]] = []
    for may_share in (False, True):
        for hostname, on_host in hosts.items():
            sights = {rank: place.sight for rank, place in on_host.items()}
            if _is_unequipped(hostname, sights, may_share=may_share):
                unequipped.append((hostname, sights))
                break
    reachable = [
        (hostname, next((place.address for place in on_host.values() if place.address is not None), None))
        for hostname, on_host in islice(hosts.items(), _MOST_ELSEWHERE + 1)
    ]
    return {
        hostname: Neighbours(
            on_host=on_host,
            node_rank=node_rank,
            num_nodes=len(hosts),
            elsewhere=tuple(at for other, at in reachable if other != hostname and at is not None)[:_MOST_ELSEWHERE],
            unequipped=tuple(unequipped),
        )
        for node_rank, (hostname, on_host) in enumerate(hosts.items())
    }


def _is_unequipped(hostname: str, sights: dict[int, Sight], *, may_share: bool) -> bool:
    try:
        refuse_unequipped(hostname, sights, may_share=may_share)
    except ConfigurationError:
        return True
    return False


def _neighbours_from(told: dict[str, Any]) -> Neighbours:
    return Neighbours(
        on_host={int(rank): _address_from(place) for rank, place in told["on_host"].items()},
        node_rank=told["node_rank"],
        num_nodes=told["num_nodes"],
        elsewhere=tuple(told["elsewhere"]),
        unequipped=tuple(
            (name, {int(rank): Sight(**sight) for rank, sight in sights.items()}) for name, sights in told["unequipped"]
        ),
    )


def hostnames_of_all(store: Store) -> list[str]:
    """Return the host of every rank of a world that has been joined, by rank."""
    runs = json.loads(store.get(_HOSTS_KEY, LINGER_SECONDS))
    return [name for name, count in runs for _ in range(count)]


def _neighbours_key(hostname: str) -> str:
    return f"rankwise/neighbours/{hostname}"


def rank_address_of(store: Store, rank: int) -> RankAddress:
    """Return the address of a rank of a world that has been joined."""
    return _from_text(store.get(rank_address_key(rank), LINGER_SECONDS))


def address_on_job(store: Store, world: World) -> str:
    """Return the address at which other ranks reach this one: that of its route to the store, as found by join."""
    if world.num_nodes == 1:
        return LOOPBACK
    return rank_address_of(store, world.rank).address or EVERY_INTERFACE


def rank_address_key(rank: int) -> str:
    """Return the key of the address of a rank, among the keys of its world."""
    return f"rankwise/places/{rank}"


def _wait_for_readers(store: Store, reading: Reading, num_readers: int) -> None:
    """Wait until the others have read the reason, as this process may be the one that serves the store."""
    if store.add("rankwise/absence_read", 1) == num_readers:
        store.set("rankwise/absence_read_by_all", "")
    if reading.rank == 0:
        with contextlib.suppress(TimeoutError):
            store.wait(["rankwise/absence_read_by_all"], LINGER_SECONDS)


def _ended_before(reading: Reading, ended: list[int]) -> RankwiseError:
    have = "has" if len(ended) == 1 else "have"
    return PeerMissing(
        f"join() cannot complete: {fold_ranks(ended)} {have} exited without an error and without joining.",
        ranks=ended,
        where=rank_prefix(reading.rank, reading.world_size, socket.gethostname()),
        evidence=reading.reason,
        do="have every rank call rankwise.join() before its script can end",
    )


def _never_joined(reading: Reading, missing: list[int], timeout_seconds: float) -> RankwiseError:
    return PeerMissing(
        f"join() timed out after {timeout_seconds:.0f} s waiting for {fold_ranks(missing)}.",
        ranks=missing,
        where=rank_prefix(reading.rank, reading.world_size, socket.gethostname()),
        evidence=reading.reason,
        do="start every rank; if that takes longer, pass join(timeout_seconds=...)",
    )
