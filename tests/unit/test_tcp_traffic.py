# SPDX-License-Identifier: Apache-2.0
"""What is read of this process's own connections, and that reading leaves them as they were."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.insight import network
from rankwise.insight.network import MOST_SECONDS, Traffic, TrafficNotes, as_json, from_json, read_traffic

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE, THERE = "127.0.0.1", "127.0.0.2"
NUM_BYTES = 300_000
WAITED_SECONDS = 0.2


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection between two addresses of this machine."""
    with ExitStack() as opened:
        listening = opened.enter_context(socket.create_server((THERE, 0)))
        near = opened.enter_context(socket.create_connection(listening.getsockname(), source_address=(HERE, 0)))
        far = opened.enter_context(listening.accept()[0])
        yield near, far


@pytest.fixture
def loopback_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of this machine count as those of others."""
    monkeypatch.setattr(network, "is_loopback", lambda _: False)


def of(traffic: list[Traffic], local: str) -> Traffic:
    return next(one for one in traffic if (one.local, one.remote) in {(local, THERE), (local, HERE)})


@pytest.mark.usefixtures("loopback_counts")
def test_bytes_are_counted_as_the_receiver_acknowledges_them(connection: tuple[socket.socket, socket.socket]) -> None:
    near, far = connection
    near.sendall(bytes(NUM_BYTES))
    assert len(far.recv(NUM_BYTES, socket.MSG_WAITALL)) == NUM_BYTES
    far.sendall(b"done")
    near.recv(4)
    sent, answered = of(read_traffic(), HERE), of(read_traffic(), THERE)
    # All but the request to open it, which counts as one; the last answer may not be acknowledged yet.
    assert NUM_BYTES <= sent.sent_bytes <= NUM_BYTES + 1
    assert answered.sent_bytes <= 5
    assert sent.segments > 0
    assert sent.retransmitted == 0
    assert 0.0 < sent.least_round_trip_seconds <= 1.0
    assert sent.round_trip_seconds > 0.0
    assert sent.bytes_per_second > 0.0
    assert 0.0 <= sent.busy_seconds < 60.0
    assert from_json(as_json(sent)) == sent


@pytest.mark.usefixtures("loopback_counts")
def test_time_in_which_the_receiver_does_not_read_is_not_the_network(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    near, _ = connection
    near.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            near.send(bytes(NUM_BYTES))
    while (waited := _receiver_full_seconds(near)) < WAITED_SECONDS:
        pass
    assert of(read_traffic(), HERE).busy_seconds < waited


def _receiver_full_seconds(connection: socket.socket) -> float:
    (microseconds,) = struct.unpack_from("=Q", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 176)
    return float(microseconds) / 1e6


@pytest.mark.usefixtures("loopback_counts")
@pytest.mark.parametrize("default", [None, 5.0])
def test_reading_changes_nothing(connection: tuple[socket.socket, socket.socket], default: float | None) -> None:
    near, _ = connection
    files, blocking = sorted(Path("/proc/self/fd").iterdir()), os.get_blocking(near.fileno())
    # With a default timeout, Python would switch a connection that it is given to not blocking.
    socket.setdefaulttimeout(default)
    try:
        assert read_traffic()
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(near.fileno()) == blocking
    assert sorted(Path("/proc/self/fd").iterdir()) == files
    near.sendall(b"still open")


def test_connections_within_the_machine_and_other_sockets_are_left_out(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    with ExitStack() as opened:
        for kind in ((socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_UNIX, socket.SOCK_STREAM)):
            opened.enter_context(socket.socket(*kind))
        assert not [one for one in read_traffic() if {one.local, one.remote} & {HERE, THERE}]
    assert connection


class Notes:
    """Takes notes in place of a record."""

    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []

    def note(self, note: dict[str, Any]) -> int:
        self.notes.append(note)
        return 0


@pytest.mark.usefixtures("loopback_counts", "connection")
def test_a_day_has_few_notes() -> None:
    notes = Notes()
    traffic = TrafficNotes()
    for now in range(24 * 3600):
        traffic.note_if_due(notes, now + 1, float(now))  # type: ignore[arg-type]
    assert 24 * 3600 / MOST_SECONDS < len(notes.notes) < 24 * 3600 / MOST_SECONDS + 12
    assert {note["kind"] for note in notes.notes} == {"network"}
