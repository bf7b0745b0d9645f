# SPDX-License-Identifier: Apache-2.0
"""A worker that is faster than its server, or whose server is stopped, waits, and queues on neither side grow."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise import testing
from rankwise.comm.session import current
from rankwise.errors import PeerMissing
from rankwise.parameter_server import worker as worker_file
from rankwise.parameter_server.messages import ReceivedMessage, WorkerConnections
from rankwise.parameter_server.worker import ServerAddress, ServerConnection
from rankwise.store.wire import json_frame, listen

if TYPE_CHECKING:
    from rankwise.world.facts import World

NUM_LOOPS = 3001
NUM_STEPS = 31
WAIT_SECONDS = 30.0


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _step_forever(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    while True:
        _step(model, optimizer)


def _runs_ahead(world: World) -> tuple[int, int]:
    """Return the longest queue on this rank, and how many loops or updates there were."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    server = rw.parameter_server(model, optimizer, mode="async")
    store = current().store
    assert store is not None
    longest = 0
    if server._server_loop is not None:
        loop = server._server_loop
        arrivals = loop._connections.arrivals
        # Both workers run ahead while this rank does something else.
        for worker in range(world.rank):
            store.get(f"ahead/{worker}", WAIT_SECONDS)
        longest = len(arrivals)
        handle = loop._handle

        def measured(arrival: ReceivedMessage) -> None:
            nonlocal longest
            longest = max(longest, len(arrivals) + 1)
            handle(arrival)

        loop._handle = measured  # type: ignore[method-assign]
        server.serve()
        return longest, loop._staleness.num_loops(7)
    assert server._worker is not None
    (connection,) = server._worker.channels
    for number in range(NUM_LOOPS):
        server.finish_loop(7, has_stepped=False)
        longest = max(longest, connection._outbox.qsize())
        if number == NUM_LOOPS // 2:
            _step(model, optimizer)
    store.set(f"ahead/{world.rank}", "")
    for _ in range(NUM_STEPS):
        _step(model, optimizer)
        longest = max(longest, connection._outbox.qsize())
    server.finish()
    return longest, server.num_updates


def test_queues_do_not_grow_with_what_a_worker_is_ahead() -> None:
    *workers, (on_server, num_loops) = [result.get() for result in testing.run_ranks(_runs_ahead, 3)]
    # Loops, a step, loops: the third of them counts up while the first two wait.
    assert all(longest <= 3 for longest, _ in workers)
    assert on_server <= 2, "one message of each worker"
    assert num_loops == NUM_LOOPS, "none was lost"
    assert max(updates for _, updates in workers) == 2 * (NUM_STEPS + 1)


def _is_stopped(_: World, mode: str) -> tuple[int, str]:
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    server = rw.parameter_server(model, optimizer, mode=mode)
    store = current().store
    assert store is not None
    if server._server_loop is not None:
        store.set("server", str(os.getpid()))
        update = server._server_loop._shard.update

        def stops(gradients: Any) -> None:
            update(gradients)
            if server.num_updates == 4:
                os.kill(os.getpid(), signal.SIGSTOP)

        server._server_loop._shard.update = stops  # type: ignore[method-assign]
        server.serve()
        return 0, ""
    worker_file.SPARE_SECONDS = 0.0
    assert server._worker is not None
    with pytest.raises(PeerMissing) as raised:
        _step_forever(model, optimizer)
    queued = server._worker.channels[0]._outbox.qsize()
    os.kill(int(store.get("server", WAIT_SECONDS)), signal.SIGCONT)
    assert queued <= 1
    return server.num_steps, str(raised.value)


@pytest.mark.parametrize(("mode", "most_steps"), [("sync", 4), ("async", 5)])
def test_a_stopped_server_is_waited_for_and_named(mode: str, most_steps: int) -> None:
    worker = testing.run_ranks(_is_stopped, 2, mode, join_timeout_seconds=3.0)[0]
    num_steps, text = worker.get()
    # In async mode the step after the unanswered one has been computed, and waits before it is sent.
    assert num_steps <= most_steps
    assert "optimizer.step() timed out" in text
    assert "rank 1" in text


def test_a_message_before_the_answer_to_the_last_one_ends_the_connection() -> None:
    parameters = [torch.zeros(3)]
    connections = WorkerConnections(listen("127.0.0.1", 0), b"secret", [0], parameters)
    server = ServerAddress(rank=1, host="127.0.0.1", port=connections.port, numbers=[0], ticket="")
    connection = ServerConnection(0, server, parameters, threading.Condition())
    connection.open(b"secret", WAIT_SECONDS)
    head = {"kind": "step", "weights": [1.0], "sums": [False]}
    connection.request(head, [0], [])
    with connections.changed:
        assert connections.changed.wait_for(lambda: len(connections.arrivals) == 1, WAIT_SECONDS)
    assert connection._socket is not None
    connection._socket.sendall(json_frame(head | {"whole": [], "rows": []}))
    with connections.changed:
        assert connections.changed.wait_for(lambda: len(connections.arrivals) == 2, WAIT_SECONDS)
    assert connections.arrivals.pop().reason == "it sent a message before its last one was answered"
    connection.close()
    connections.close()
