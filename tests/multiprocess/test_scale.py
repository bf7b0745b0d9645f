# SPDX-License-Identifier: Apache-2.0
"""A rank and a host send and receive as much in a large job as in a small one, as ``make scale`` measures."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.errors import PeerMissing
from rankwise.health import failure_detector, process_probe
from rankwise.health.event_log import MOST_REPORTED, Failed, key_of, post
from rankwise.launch.controller.coordinator import DEPARTED_SECONDS, Coordinator, Disconnect, Phase
from rankwise.launch.controller.server import TICK_SECONDS, AttemptKeys
from rankwise.launch.messages import Node, RankEnds, RanksDeparted, ShowText, StartAttempt, encode
from rankwise.store import bootstrap
from rankwise.store.keys import Keys
from rankwise.store.opening import connect, serve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FAILED = Failed(3, "ValueError", "Traceback ...\n" * 50, "gpu-00000")
MOST_MESSAGES = {"join": 8.5, "confirm": 3.5, "failure": 1.5, "leave": 16.0}
"""Of a rank, on average, in a job of any size."""
MOST_BYTES = {"join": 6_000, "confirm": 500, "failure": 1_500, "leave": 4_000}


@pytest.fixture(name="parts")
def _parts() -> Iterator[Any]:
    """The module of the benchmark that simulates ranks."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module("scale_parts")
    sys.path.remove(folder)
    del sys.modules["scale_parts"]


@pytest.fixture(name="turns")
def _turns(parts: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ranks in this process take turns until the test ends."""
    monkeypatch.setattr(bootstrap, "own_rank_address", parts.own_rank_address)
    for module, name in (
        (failure_detector, "threading"),
        (failure_detector, "hold_during_forks"),
        (process_probe, "time"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # is restored after the test
    turns = parts.Turns()
    parts.take_turns(turns)
    return turns


@pytest.mark.parametrize("world_size", [24, 200])
def test_a_rank_sends_and_receives_as_much_in_a_job_of_any_size(parts: Any, turns: Any, world_size: int) -> None:
    store, port = serve(secret=parts.SECRET.encode())
    hosts = parts.Hosts(turns, port, range(world_size // 8), world_size)
    counted = hosts.counted
    found: dict[str, dict[str, int]] = {}
    hosts.join(0)
    found["join"] = counted.take()
    hosts.barrier("a save")
    found["confirm"] = counted.take()
    post(store.prefixed("attempt/0"), FAILED)
    hosts.know_failure(3)
    found["failure"] = counted.take()
    hosts.leave()
    found["leave"] = counted.take()
    store.close()
    assert hosts.errors == []
    for phase, counts in found.items():
        assert counts["messages"] / world_size <= MOST_MESSAGES[phase], phase
        assert counts["bytes"] / world_size <= MOST_BYTES[phase], phase


@pytest.mark.parametrize("world_size", [80, 240])
def test_a_waiting_rank_looks_up_departures_as_cheaply_in_a_job_of_any_size(
    parts: Any, turns: Any, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    monkeypatch.setattr(failure_detector, "FIRST_LOOK_UP_SECONDS", 0.0)
    store, port = serve(secret=parts.SECRET.encode())
    hosts = parts.Hosts(turns, port, range(world_size // 8), world_size)
    hosts.join(0)
    left, others = hosts.ranks[:20], hosts.ranks[20:]
    found: dict[int, BaseException | None] = {}

    def leave(ranks: Sequence[int]) -> None:
        hosts.each(ranks, lambda rank: hosts.detectors[rank].leave(wait_for_peers=False))
        assert turns.run_until(lambda: all(hosts.detectors[rank].next_event > MOST_REPORTED for rank in others), 60)
        hosts.counted.take()

    def look(ticket_of: dict[int, Any]) -> dict[str, float]:
        def of(rank: int) -> None:
            detector = hosts.detectors[rank]
            detector.note_wait(ticket_of[rank])
            found[rank] = detector.failure_blocking(ticket_of[rank])
            detector.note_wait(None)

        hosts.each(list(ticket_of), of)
        return {name: number / len(ticket_of) for name, number in hosts.counted.take().items()}

    tickets = {rank: hosts.detectors[rank].ticket("barrier()") for rank in hosts.ranks}
    leave(left)
    waiting = {rank: tickets[rank] for rank in others}
    first, second = look(waiting), look(waiting)
    # These had begun it before they left.
    assert set(found.values()) == {None}
    assert first["messages"] <= 2
    assert first["bytes"] <= 5_000
    assert second["messages"] <= 1
    assert second["bytes"] <= 100
    leave([40])
    del waiting[40]
    next_tickets = {rank: hosts.detectors[rank].ticket("all_reduce()") for rank in waiting}
    look(waiting)
    assert set(map(found.get, waiting)) == {None}
    look(next_tickets)
    errors = [found[rank] for rank in waiting]
    assert all(isinstance(error, PeerMissing) for error in errors)
    hosts.each(list(waiting), lambda rank: hosts.detectors[rank].leave(wait_for_peers=False))
    store.close()
    assert hosts.errors == []


SERVER = """
import resource, sys
from rankwise.store.opening import connect, serve
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
store, port = serve(secret=sys.argv[1].encode())
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
print(port, flush=True)
sys.stdin.read()
"""


def test_a_server_takes_more_connections_than_the_usual_limit_of_open_files(parts: Any) -> None:
    secret = parts.SECRET
    command = [sys.executable, "-c", SERVER, secret]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())
        clients = [connect("127.0.0.1", port, 20.0, secret=secret.encode()) for _ in range(100)]
        assert clients[-1].add("number", 1) == 1
        for client in clients:
            client.close()
        server.stdin.close()
        assert server.wait(timeout=20.0) == 0


class _CountedKeys(Keys):
    """Counts how often it looks for a key."""

    num_looks = 0

    def check(self, keys: Sequence[str]) -> bool:
        self.num_looks += 1
        return super().check(keys)


def _started(num_hosts: int, now: float) -> Coordinator:
    """Return the coordinator of a job whose ranks run."""
    coordinator = Coordinator(
        nodes=(num_hosts, num_hosts), max_restarts=0, rendezvous="here:1", timeout_seconds=60.0, now=now, run_id="x"
    )
    for host in range(num_hosts):
        name = f"gpu-{host:05d}"
        coordinator.node_joined(Node(node_id=name, hostname=name, num_ranks=8, node_rank=host, serves=host == 0), now)
    assert coordinator.phase is Phase.RUNNING
    return coordinator


@pytest.mark.parametrize("num_lost", [5, 50])
def test_all_ranks_read_as_many_events_however_many_hosts_are_lost(num_lost: int) -> None:
    coordinator, keys = _started(100, 0.0), _CountedKeys()
    of_attempt = AttemptKeys(keys, 0, 800)
    for host in range(num_lost):
        coordinator.node_lost(f"gpu-{host + 1:05d}", 1.0, "was lost")
        for _, event in coordinator.take_output()[1]:
            of_attempt.post(event)
    num_events = 0
    while keys.peek(f"attempt/0/{key_of(num_events + 1)}") is not None:
        num_events += 1
    assert num_events == MOST_REPORTED
    assert keys.num_looks <= 3 * 8 * num_lost
    # The others are found by their keys.
    assert sum(keys.peek(f"attempt/0/rankwise/departed/{rank}") is not None for rank in range(800)) == 8 * num_lost


def _sent(num_hosts: int) -> dict[str, float]:
    """Return how many messages and bytes a host of such a job receives, from its start to its orderly end."""
    now = time.monotonic()
    coordinator = _started(num_hosts, now)
    ticks = [now + number * TICK_SECONDS for number in range(1, round((DEPARTED_SECONDS + 4) / TICK_SECONDS))]
    for local_rank, tick in enumerate(ticks):
        # One rank of each host after another.
        for host in range(num_hosts) if local_rank < 8 else ():
            coordinator.rank_departed(0, 8 * host + local_rank)
        coordinator.tick(tick)
    for host in range(num_hosts):
        ends = dict.fromkeys(range(8 * host, 8 * host + 8), "exited with code 0")
        coordinator.ranks_ended(f"gpu-{host:05d}", 0, RankEnds(ends=ends), now)
    assert coordinator.phase is Phase.OVER
    messages = [one for _, one in coordinator.take_output()[0] if not isinstance(one, Disconnect)]
    starts = [len(encode(one)) for one in messages if isinstance(one, StartAttempt)]
    texts = [one for one in messages if isinstance(one, ShowText)]
    departed = [one for one in messages if isinstance(one, RanksDeparted)]
    assert {run for one in departed for run in one.runs} == {(0, 8 * num_hosts - 1)}
    return {
        "bytes of departures": sum(len(encode(one)) for one in departed) / num_hosts,
        "messages": len(messages) / num_hosts,
        "texts": len(texts) / num_hosts,
        "bytes of the last start": starts[-1],
    }


def test_a_host_receives_as_many_messages_in_a_job_of_any_size() -> None:
    small, large = _sent(80), _sent(800)
    assert large["messages"] <= small["messages"] <= 5
    assert large["texts"] <= small["texts"] <= 1.1
    assert large["bytes of departures"] <= small["bytes of departures"] + 2 <= 100
    assert large["bytes of the last start"] <= small["bytes of the last start"] + 20
