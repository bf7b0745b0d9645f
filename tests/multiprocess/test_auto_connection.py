# SPDX-License-Identifier: Apache-2.0
"""A server of ``rankwise run --auto`` that stops: rank zero names it, and waits no longer than for a collective."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import torch

from rankwise.auto.connection import accept_servers, connect
from rankwise.comm.session import current
from rankwise.errors import PeerMissing
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise import World

LIMIT_SECONDS = 1.0
MOST_BYTES = 2**26
"""More than the kernel keeps for a connection."""


def _exchange_until_it_stops(world: World, when: str, folder: Path) -> None:
    session = current()
    assert session.store is not None
    assert session.detector is not None
    number = folder / "process"
    if world.rank == 1:
        number.write_text(str(os.getpid()), encoding="ascii")
        connection = connect(session, session.store, session.detector)
        connection.await_request()
        connection.receive()
        if when == "within its reply":
            connection._sock.send(b"\0\0\0")
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    (connection,) = accept_servers(session, session.store, session.detector)
    connection.is_local = False
    try:
        connection.send("a request")
        if when == "before it reads":
            connection.send("more", [torch.zeros(MOST_BYTES, dtype=torch.uint8)])
        connection.receive()
    finally:
        os.kill(int(number.read_text(encoding="ascii")), signal.SIGCONT)


@pytest.mark.parametrize("when", ["before its reply", "within its reply", "before it reads"])
def test_a_server_that_stops_is_named_with_its_state(tmp_path: Path, when: str) -> None:
    results = run_ranks(_exchange_until_it_stops, 2, when, tmp_path, join_timeout_seconds=LIMIT_SECONDS)
    error = results[0].error
    assert isinstance(error, PeerMissing), error
    assert error.ranks == (1,)
    assert "a split call timed out after" in str(error)
    assert "stopped (SIGSTOP" in str(error)
