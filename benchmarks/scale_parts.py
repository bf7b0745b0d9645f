# SPDX-License-Identifier: Apache-2.0
"""The processes of benchmarks/scale.py: a server, and many simulated hosts with their ranks; each obeys lines of JSON.

The server is the launcher's own: its store, coordinator and event log on one port. A simulated rank runs what a real
rank runs in ``rankwise.join()``, with the project's own client and failure detector, over a connection of its own
(``scale_ranks.py``); a simulated host has the real connection of an agent. Only the name and address of a host are
invented, and the network between them is loopback.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from scale_ranks import PAUSE_SECONDS, Counted, Socket, Turns, take_turns

from rankwise.comm.agreement import StoreRanks
from rankwise.comm.collectives.objects import agree_on_key
from rankwise.health.event_log import NUM_DEPARTED_KEY, key_of
from rankwise.health.failure_detector import FailureDetector
from rankwise.launch.controller.coordinator import Coordinator
from rankwise.launch.controller.link import ControllerLink
from rankwise.launch.controller.server import GARBAGE_THRESHOLDS, JobServer, TorchStores
from rankwise.launch.messages import (
    PURPOSE,
    EndJob,
    Hello,
    Message,
    Node,
    RankDeparted,
    RankEnds,
    RankFailed,
    RanksEnded,
    StartAttempt,
    StopAttempt,
)
from rankwise.launch.report.failure import Failure
from rankwise.store import bootstrap
from rankwise.store.client import Store, StoreConnection
from rankwise.store.wire import listen, open_connection
from rankwise.world.device.choice import Sight
from rankwise.world.environments.reading import Reading
from rankwise.world.facts import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SECRET = "of this simulation"  # noqa: S105 - and of nothing else
HOST = "127.0.0.1"
RANKS_PER_HOST = 8
LIMIT_SECONDS = 280.0
NCCL_ID_BYTES = 128


def raise_file_limit() -> None:
    """Allow as many open files as the system does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def usage() -> dict[str, float]:
    """Return what this process has used."""
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu": cpu.ru_utime + cpu.ru_stime, "megabytes": cpu.ru_maxrss / 1024}


def serve(num_hosts: int) -> None:
    """Serve a job until the lines end; answer each with what was used so far."""
    listener = listen(HOST, 0)
    coordinator = Coordinator(
        nodes=(num_hosts, num_hosts),
        max_restarts=2,
        rendezvous="here",
        timeout_seconds=LIMIT_SECONDS,
        now=time.monotonic(),
        run_id="scale",
    )
    server = JobServer(listener, SECRET.encode(), coordinator, TorchStores(HOST, HOST, "off", on_one_machine=False))
    tell({"port": listener.getsockname()[1], **usage()})
    for _ in sys.stdin:
        tell(usage())
    server.close()


def serve_torch() -> None:
    """Serve torch's own store until the lines end."""
    store = dist.TCPStore(HOST, 0, None, True, wait_for_workers=False, use_libuv=True)
    tell({"port": store.port, **usage()})
    for _ in sys.stdin:
        tell(usage())


def tell(what: dict[str, Any]) -> None:
    """Answer on one line."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Hosts:
    """Some hosts of the job, and their ranks, in one process."""

    def __init__(self, turns: Turns, port: int, hosts: Sequence[int], world_size: int) -> None:
        self.turns = turns
        self.counted = Counted()
        self.port, self.world_size = port, world_size
        self.numbers = hosts
        self.ranks = [rank for host in hosts for rank in self.ranks_of(host)]
        self.links: dict[int, ControllerLink] = {}
        self.received: dict[int, list[Message]] = {}
        self.sockets: dict[int, Socket] = {}
        self.detectors: dict[int, FailureDetector] = {}
        self.stores: dict[int, Store] = {}
        self.errors: list[str] = []

    def ranks_of(self, host: int) -> range:
        """Return the ranks of a host."""
        return range(host * RANKS_PER_HOST, min((host + 1) * RANKS_PER_HOST, self.world_size))

    def each(self, items: Sequence[int], act: Callable[[int], None]) -> None:
        """Do something for each item, all at once."""
        left = set(items)

        def run(item: int) -> None:
            try:
                act(item)
            except Exception as error:  # noqa: BLE001 - told to the main process
                self.errors.append(f"{item}: {type(error).__name__}: {error}"[:500])
            left.discard(item)

        for item in items:
            self.turns.start(run, item)
        if not self.turns.run_until(lambda: not left, LIMIT_SECONDS):
            self.errors.append(f"{len(left)} did not end")

    # -- agents ----------------------------------------------------------------------------------------

    def open_links(self) -> None:
        """Introduce every host to the coordinator, unless it has a connection."""
        for host in [host for host in self.numbers if host not in self.links]:
            node = Node(
                node_id=f"n{host}",
                hostname=hostname(host),
                num_ranks=len(self.ranks_of(host)),
                node_rank=host,
                serves=host == 0,
                job={"script": "train.py", "torch": "2.9"},
            )
            connection = open_connection(HOST, self.port, SECRET.encode(), PURPOSE, LIMIT_SECONDS)
            link = self.links[host] = ControllerLink(connection, Hello(node=node))
            self.received[host] = []
            read = partial(lambda link, received: received.extend(link.receive()), link, self.received[host])
            self.turns.when_ready(link.fileno(), select.EPOLLIN, read)

    def wait_for(self, kind: type, *, attempt: int | None = None) -> None:
        """Return when every host has received a message of one kind."""

        def has_come(message: Message) -> bool:
            return isinstance(message, kind) and attempt in (None, getattr(message, "attempt", None))

        def missing() -> list[int]:
            return [host for host, messages in self.received.items() if not any(map(has_come, messages))]

        if not self.turns.run_until(lambda: not missing(), LIMIT_SECONDS):
            self.errors.append(f"{len(missing())} hosts received no {kind.__name__}")
        for messages in self.received.values():
            messages.clear()

    def fail(self, rank: int, attempt: int) -> None:
        """Have the agent of a rank report that it failed."""
        failed = Failure(
            rank=rank,
            type="ValueError",
            message="bad batch",
            traceback="Traceback ...\n" * 50,
            time=time.time(),
            exit_code=1,
        )
        self.links[rank // RANKS_PER_HOST].send(RankFailed(attempt=attempt, failure=failed))

    def lose(self) -> None:
        """Lose one host in ten: its connection and those of its ranks are closed."""
        for host in [host for host in self.numbers if is_lost(host)]:
            self.received.pop(host)
            link = self.links.pop(host)
            self.turns.forget(link.fileno())
            link.close()
            for rank in self.ranks_of(host):
                self.detectors.pop(rank)
                self.stores.pop(rank)
                self.sockets.pop(rank).drop()

    def ends(self, attempt: int, *, departed: bool) -> None:
        """Have every agent report that its ranks have exited: each for itself, and all together."""
        for host, link in self.links.items():
            for rank in self.ranks_of(host) if departed else ():
                link.send(RankDeparted(attempt=attempt, rank=rank))
            ends = dict.fromkeys(self.ranks_of(host), "exited with code 0")
            link.send(RanksEnded(attempt=attempt, report=RankEnds(ends=ends)))

    # -- ranks -----------------------------------------------------------------------------------------

    def join(self, attempt: int) -> None:
        """Join as ``rankwise.join()`` does, up to and without torch's group; then read NCCL's identifier."""

        def join(rank: int) -> None:
            reading = Reading(
                rank=rank,
                world_size=self.world_size,
                local_rank=rank % RANKS_PER_HOST,
                source="rankwise",
                address=(HOST, self.port),
                secret=SECRET,
                store_is_served=True,
                attempt=str(attempt),
            )
            self.sockets[rank] = Socket(self.turns, self.counted, (HOST, self.port), SECRET.encode(), LIMIT_SECONDS)
            shared: Any = self.sockets[rank]
            store = Store(StoreConnection(shared), f"attempt/{attempt}")
            store.expect_answers_within(LIMIT_SECONDS)
            bootstrap.exchange_rank_addresses(store, reading, LIMIT_SECONDS, sight_of(rank))
            agree_on_key(store, SECRET.encode())
            self.stores[rank] = store
            self.detectors[rank] = FailureDetector(store, world_of(rank, self.world_size), LIMIT_SECONDS)
            group = store.prefixed("group")
            if rank == 0:
                group.set("0", bytes(NCCL_ID_BYTES))
            group.get("0", LIMIT_SECONDS)

        self.each(self.ranks, join)

    def barrier(self, name: str) -> None:
        """Confirm a step on all ranks through the store, as a background save does."""

        def confirm(rank: int) -> None:
            detector = self.detectors[rank]
            session: Any = SimpleNamespace(world=detector.world, detector=detector)
            StoreRanks(session, self.stores[rank], name).confirm("saving", lambda: {"crc": "00000000", "size": 2**30})

        self.each(self.ranks, confirm)

    def know_failure(self, failed: int) -> None:
        """Return when every rank but the one that failed knows why it cannot continue."""
        others = [detector for rank, detector in self.detectors.items() if rank != failed]
        if not self.turns.run_until(lambda: all(one.error is not None for one in others), LIMIT_SECONDS):
            self.errors.append("not every rank was told")
        self.errors += [str(one.error) for one in others if f"Rank {failed} " not in str(one.error)]

    def know_losses(self) -> None:
        """Return when every rank that is left knows that it cannot continue, and has read all events of the losses."""
        left = list(self.detectors.values())
        num_hosts = -(-self.world_size // RANKS_PER_HOST)
        num_lost = sum(len(self.ranks_of(host)) for host in range(num_hosts) if is_lost(host))
        ends_at: list[int] = []

        def find_end(rank: int) -> None:
            store = self.stores[rank]
            while store.add(NUM_DEPARTED_KEY, 0) < num_lost:
                self.turns.sleep(PAUSE_SECONDS)
            number = self.detectors[rank].next_event
            while store.check(key_of(number)):
                number += 1
            ends_at.append(number)

        self.each(list(self.detectors)[:1], find_end)
        if not self.turns.run_until(
            lambda: all(one.error is not None and one.next_event >= max(ends_at) for one in left), LIMIT_SECONDS
        ):
            self.errors.append("not every rank has read the log")

    def poll_status(self) -> None:
        """Have the first rank of this process ask every rank what it is doing."""

        def poll(rank: int) -> None:
            missing = self.world_size - len(self.detectors[rank].poll_status())
            if missing:
                print(f"{missing} of {self.world_size} ranks did not answer in time", file=sys.stderr)

        self.each(self.ranks[:1], poll)

    def leave(self) -> None:
        """Leave on every rank, as at the end of a script."""

        def leave(rank: int) -> None:
            self.detectors[rank].leave(wait_for_peers=False)
            self.detectors[rank].store.close()
            self.stores[rank].close()

        self.each(list(self.detectors), leave)
        self.detectors.clear()
        self.stores.clear()


def is_lost(host: int) -> bool:
    """Return whether this host is among those that are lost: one in ten, never the one that serves the job."""
    return host % 10 == 1


def hostname(host: int) -> str:
    """Return the invented name of a host."""
    return f"gpu-{host:05d}"


def sight_of(rank: int) -> Sight:
    """Return what a rank on a host with eight GPUs sees."""
    return Sight(
        kind="cuda", devices=[f"GPU-{rank // 8:08d}-{n:04d}" for n in range(8)], local_rank=rank % RANKS_PER_HOST
    )


def own_rank_address(store_host: str | None, sight: Sight) -> bootstrap.RankAddress:
    """Return the invented address of a host, which the names of its GPUs tell."""
    del store_host
    host = int(sight.devices[0].split("-")[1])
    return bootstrap.RankAddress(hostname=hostname(host), address=f"10.{host >> 8}.{host & 255}.1", sight=sight)


def world_of(rank: int, world_size: int) -> World:
    """Return the facts of a rank."""
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=rank % RANKS_PER_HOST,
        local_world_size=RANKS_PER_HOST,
        node_rank=rank // RANKS_PER_HOST,
        num_nodes=-(-world_size // RANKS_PER_HOST),
        device="cuda:0",
        backend="nccl",
        hostname=hostname(rank // RANKS_PER_HOST),
        source="rankwise",
    )


def torch_join(port: int, ranks: Sequence[int], world_size: int) -> None:
    """Do the same join with torch's own store: an address each, a wait for all, and an answer for each."""
    stores: list[dist.TCPStore] = []
    limit = timedelta(seconds=LIMIT_SECONDS)

    def join(rank: int) -> None:
        store = dist.TCPStore(HOST, port, None, False, timeout=limit, wait_for_workers=False)
        stores.append(store)
        store.set(f"places/{rank}", "x" * 300)
        if store.add("joined", 1) == world_size:
            store.set("all", "x" * 1200)
        store.get("all")
        store.compare_set("key", "", "x" * 64)
        store.set(f"processes/{rank}", "x" * 100)
        if rank == 0:
            store.set("id", "x" * NCCL_ID_BYTES)
        store.get("id")

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def simulate(port: int, hosts: Sequence[int], world_size: int) -> None:
    """Obey lines, each a method of :class:`Hosts` and its arguments; answer with the time of its end and the counts."""
    threading.stack_size(256 * 1024)
    gc.disable()  # Looking for cycles among thousands of ranks takes time from the server.
    turns, lines = Turns(), Lines()
    here = Hosts(turns, port, hosts, world_size)
    take_turns(turns)
    bootstrap.own_rank_address = own_rank_address
    kinds = {"StartAttempt": StartAttempt, "StopAttempt": StopAttempt, "EndJob": EndJob}
    turns.when_ready(sys.stdin.fileno(), select.EPOLLIN, lines.read)
    tell({})
    while turns.run_until(lambda: bool(lines.whole) or lines.have_ended, LIMIT_SECONDS) and lines.whole:
        word, *arguments = json.loads(lines.whole.popleft())
        if word == "torch_join":
            torch_join(arguments[0], here.ranks, world_size)
        elif word == "wait_for":
            here.wait_for(kinds[arguments[0]], **arguments[1])
        else:
            keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
            getattr(here, word)(*arguments, **keywords)
        told, here.errors = here.errors[:3], []
        tell({"at": time.monotonic(), "errors": told, **here.counted.take(), **usage()})


class Lines:
    """The lines of standard input, read as they come."""

    def __init__(self) -> None:
        self.whole: deque[str] = deque()
        self.have_ended = False
        self._part = ""

    def read(self) -> None:
        """Read what is there."""
        data = os.read(sys.stdin.fileno(), 1 << 16)
        *whole, self._part = (self._part + data.decode()).split("\n")
        self.whole.extend(whole)
        self.have_ended = not data


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        raise_file_limit()
        gc.freeze()  # as the launcher does after its imports
        gc.set_threshold(*GARBAGE_THRESHOLDS)
        socket.setdefaulttimeout(None)
        part, *numbers = sys.argv[1:]
        if part == "server":
            serve(*map(int, numbers))
        elif part == "torch":
            serve_torch()
        else:
            given_port, first_host, end_host, size = map(int, numbers)
            simulate(given_port, range(first_host, end_host), size)
        sys.stdout.flush()
        os._exit(0)
