# SPDX-License-Identifier: Apache-2.0
"""What strangers can do to a job by way of its store: nothing."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from stranger import LOOPBACK, SECRET, greet

from rankwise.store import server
from rankwise.store.keys import PURPOSE
from rankwise.store.opening import connect, serve
from rankwise.store.server import MOST_STRANGERS
from rankwise.store.wire import (
    HANDSHAKE_FRAME_BYTES,
    Answer,
    Nonces,
    hello,
    listen,
    new_nonce,
    pack_fields,
    proof,
    receive_frame,
    send_frame,
)

if TYPE_CHECKING:
    from tests.warm import WarmPython

NUM_STEPS = 5
"""How many steps the ranks train while one thing is tried."""


RANK = """
import warnings
warnings.simplefilter("error")
import sys, torch, torch.distributed as dist, rankwise as rw
from datetime import timedelta
from rankwise.comm.session import current
torch.set_num_threads(1)
rank, port, num_phases, num_steps = map(int, sys.argv[1:])
with rw.join(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3, timeout_seconds=30) as world:
    store = current().store
    torch.manual_seed(rank)
    model = rw.replicate(torch.nn.Linear(3, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for phase in range(num_phases):
        store.wait([f"go/{phase}"], 30)
        for step in range(num_steps):
            x = torch.arange(3, dtype=torch.float64)[None] + rank + step
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        # Each of these needs the store while it is under attack.
        group = dist.new_group()
        dist.barrier(group=group)
        objects = [None] * 3
        dist.all_gather_object(objects, rank, group=group)
        assert objects == [0, 1, 2], objects
        dist.monitored_barrier(timeout=timedelta(seconds=30))
        store.set(f"done/{phase}/{rank}", repr(model.weight.tolist()))
    store.wait(["end"], 30)
"""


def garbage(port: int) -> list[socket.socket]:
    found = []
    for words in (b"\xff" * 5000, b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\0" * 100, b"\xff\xff\xff\xff", b"\0"):
        stranger = socket.create_connection((LOOPBACK, port), 10)
        stranger.sendall(words)
        found.append(stranger)
    return found


def forged(port: int) -> list[socket.socket]:
    """Frames as a rank sends them, but for the secret."""
    found = []
    for secret in (b"", b"another"):
        stranger, nonce = greet(port)
        own = new_nonce()
        send_frame(stranger, hello(own, PURPOSE))
        send_frame(stranger, proof(secret, b"client", PURPOSE, Nonces(client=own, server=nonce)))
        send_frame(stranger, pack_fields([b"set", b"attempt/0/rankwise/kept", b"broken"]))
        assert receive_frame(stranger, HANDSHAKE_FRAME_BYTES) == bytes([Answer.REFUSED])
        found.append(stranger)
    return found


def torchs_own(port: int) -> list[socket.socket]:
    # With torch's store on the other side this client may read, overwrite and delete every key.
    with pytest.raises(RuntimeError):
        dist.TCPStore(LOOPBACK, port, None, False, timeout=timedelta(seconds=1), wait_for_workers=False)
    return []


def idle(port: int) -> list[socket.socket]:
    return [socket.create_connection((LOOPBACK, port), 10) for _ in range(1000)]


def nobody(port: int) -> list[socket.socket]:
    return []


ATTACKS = (nobody, garbage, forged, torchs_own, idle)


def expected_weights() -> list[str]:
    """Train in one process what three ranks train together; return the weights after each phase."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = []
    for _ in ATTACKS:
        for step in range(NUM_STEPS):
            x = torch.arange(3, dtype=torch.float64)[None] + torch.arange(3)[:, None] + step
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.detach().clone())
    return weights


def test_a_stranger_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.1)
    store, port = serve(secret=SECRET)
    with greet(port)[0] as stranger:
        stranger.settimeout(20)
        assert stranger.recv(1) == b"", "the server has ended the connection"
    store.close()


def test_strangers_neither_alter_nor_stop_a_job(warm_python: WarmPython) -> None:
    with listen(LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]
    variables = {**warm_python.environment, "RANKWISE_SECRET": SECRET.decode()}
    with ExitStack() as ended:
        ranks = [
            ended.enter_context(
                warm_python.start(["-c", RANK, *map(str, (rank, port, len(ATTACKS), NUM_STEPS))], Path.cwd(), variables)
            )
            for rank in range(3)
        ]
        for process in ranks:
            ended.callback(process.kill)
        store = connect(LOOPBACK, port, 50, secret=SECRET).prefixed("attempt/0")
        store.set("rankwise/kept", "whole")
        for phase, attack in enumerate(ATTACKS):
            strangers = [ended.enter_context(stranger) for stranger in attack(port)]
            store.set(f"go/{phase}", "")
            for rank in range(3):
                weight = torch.tensor(json.loads(store.get(f"done/{phase}/{rank}", 30)), dtype=torch.float64)
                torch.testing.assert_close(weight, expected_weights()[phase], rtol=1e-10, atol=1e-10)
            # Who comes in the middle of it is let in, and the server has not run out of anything.
            connect(LOOPBACK, port, 30, secret=SECRET).set("seen", "")
            assert len(list(Path(f"/proc/{ranks[0].pid}/fd").iterdir())) < MOST_STRANGERS + 100
            assert store.get("rankwise/kept", 1) == b"whole"
            for stranger in strangers:
                stranger.close()
        store.set("end", "")
        for process in ranks:
            _, err = process.communicate()
            assert process.returncode == 0, err
            assert "Traceback" not in err
            assert SECRET.decode() not in err
