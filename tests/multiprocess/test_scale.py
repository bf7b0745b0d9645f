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

from rankwise.health import failure_detector, process_probe
from rankwise.health.event_log import Failed, post
from rankwise.launch.controller.coordinator import Coordinator, Disconnect, Phase
from rankwise.launch.messages import Node, RankEnds, ShowText, StartAttempt, encode
from rankwise.store import bootstrap
from rankwise.store.opening import connect, serve

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@pytest.mark.parametrize("world_size", [24, 200])
def test_a_rank_sends_and_receives_as_much_in_a_job_of_any_size(
    parts: Any, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    monkeypatch.setattr(bootstrap, "own_rank_address", parts.own_rank_address)
    for module, name in (
        (failure_detector, "threading"),
        (failure_detector, "hold_during_forks"),
        (process_probe, "time"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # is restored after the test
    turns = parts.Turns()
    parts.take_turns(turns)
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


def _sent(num_hosts: int) -> dict[str, float]:
    """Return how many messages and bytes a host of such a job receives, from its start to its orderly end."""
    now = time.monotonic()
    coordinator = Coordinator(
        nodes=(num_hosts, num_hosts), max_restarts=0, rendezvous="here:1", timeout_seconds=60.0, now=now, run_id="x"
    )
    for host in range(num_hosts):
        name = f"gpu-{host:05d}"
        coordinator.node_joined(Node(node_id=name, hostname=name, num_ranks=8, node_rank=host, serves=host == 0), now)
    assert coordinator.phase is Phase.RUNNING
    for rank in range(8 * num_hosts):
        coordinator.rank_departed(0, rank)
    coordinator.tick(now)
    for host in range(num_hosts):
        ends = dict.fromkeys(range(8 * host, 8 * host + 8), "exited with code 0")
        coordinator.ranks_ended(f"gpu-{host:05d}", 0, RankEnds(ends=ends), now)
    assert coordinator.phase is Phase.OVER
    messages = [one for _, one in coordinator.take_output()[0] if not isinstance(one, Disconnect)]
    starts = [len(encode(one)) for one in messages if isinstance(one, StartAttempt)]
    texts = [one for one in messages if isinstance(one, ShowText)]
    return {
        "messages": len(messages) / num_hosts,
        "texts": len(texts) / num_hosts,
        "bytes of the last start": starts[-1],
    }


def test_a_host_receives_as_many_messages_in_a_job_of_any_size() -> None:
    small, large = _sent(80), _sent(800)
    assert large["messages"] <= small["messages"] <= 5
    assert large["texts"] <= small["texts"] <= 1.1
    assert large["bytes of the last start"] <= small["bytes of the last start"] + 20
