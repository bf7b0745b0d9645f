# SPDX-License-Identifier: Apache-2.0
"""What this process's TCP connections have sent to other machines, and how long that took: as the kernel counts it.

The kernel counts for each connection since it was opened, for all its users: Gloo, rankwise's own, NCCL without
InfiniBand. Shared memory, InfiniBand and other transports are not TCP, and not seen. Linux only; no torch.

Source: ``struct tcp_info`` in linux/tcp.h; busy and limited times since Linux 4.10.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankwise.world.network import canonical, is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.insight.step_record import RecordFile

FIRST_SECONDS = 1.0
MOST_SECONDS = 600.0
NOTE = "network"
"""The kind of the notes."""
LEAST_SHARE = 0.1
"""A connection that has sent less, of what the largest one to the same address has, is left out: its messages are
small, and each is under way for a round trip."""

_FILES = "/proc/self/fd"
_INFO = struct.Struct("=68x I 28x I 16x Q 20x I 4x I Q Q Q")
"""Smoothed round-trip time, retransmitted segments, acknowledged bytes, least round-trip time, segments with data,
bytes per second as last measured, time with data under way, and of that time waiting for room at the receiver. Times
are in microseconds."""
_NO_SAMPLE = 2**32 - 1
"""The least round-trip time before there was one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What this process has sent from one address to another one, over its open connections."""

    local: str
    remote: str
    sent_bytes: int
    """Acknowledged by the receiver."""
    busy_seconds: float
    """How long data was under way, unless the receiver's buffer was full: then it is its process that is slow."""
    segments: int
    retransmitted: int
    """Segments that were sent again."""
    round_trip_seconds: float
    """Of the connection that has sent most: the latest, smoothed. Includes waiting behind other data."""
    least_round_trip_seconds: float
    """The shortest of any connection."""
    bytes_per_second: float
    """Of the connection that has sent most: how fast data has arrived, as the kernel has measured last."""


class TrafficNotes:
    """Notes in a rank's record: what it has sent so far, with pauses that double, so that their number stays small."""

    def __init__(self) -> None:
        self._next = 0.0
        self._pause = FIRST_SECONDS

    def note_if_due(self, record: RecordFile, num_steps: int, now: float) -> None:
        """Add a note if the last one is old enough; ``now`` is by any clock that does not go back."""
        if now >= self._next:
            self.note(record, num_steps)
            self._next = now + self._pause
            self._pause = min(2 * self._pause, MOST_SECONDS)

    def note(self, record: RecordFile, num_steps: int) -> None:
        """Add a note, if there is anything to note, after this many steps."""
        traffic = read_traffic()
        if traffic:
            record.note({"kind": NOTE, "steps": num_steps, "traffic": [as_json(one) for one in traffic]})


def as_json(traffic: Traffic) -> list[Any]:
    """Return the values in the order of the fields."""
    return [getattr(traffic, name) for name in Traffic.__slots__]


def from_json(values: list[Any]) -> Traffic:
    """Return what :func:`as_json` was given."""
    return Traffic(**dict(zip(Traffic.__slots__, values, strict=True)))


def read_traffic() -> list[Traffic]:
    """Return what this process has sent to other addresses: nothing on a system that does not count it."""
    found: dict[tuple[str, str], list[_Counts]] = {}
    for local, remote, counts in _connections():
        found.setdefault((local, remote), []).append(counts)
    return [_sum(local, remote, counts) for (local, remote), counts in found.items()]


@dataclass(frozen=True, slots=True)
class _Counts:
    """Of one connection. Times are in microseconds."""

    round_trip: int
    retransmitted: int
    sent_bytes: int
    least_round_trip: int
    segments: int
    bytes_per_second: int
    busy: int
    receiver_full: int


def _sum(local: str, remote: str, connections: list[_Counts]) -> Traffic:
    largest = max(connections, key=lambda one: one.sent_bytes)
    counts = [one for one in connections if one.sent_bytes >= LEAST_SHARE * largest.sent_bytes]
    least = min(one.least_round_trip for one in counts)
    return Traffic(
        local=local,
        remote=remote,
        sent_bytes=sum(one.sent_bytes for one in counts),
        busy_seconds=sum(one.busy - one.receiver_full for one in counts) / 1e6,
        segments=sum(one.segments for one in counts),
        retransmitted=sum(one.retransmitted for one in counts),
        round_trip_seconds=largest.round_trip / 1e6,
        least_round_trip_seconds=0.0 if least == _NO_SAMPLE else least / 1e6,
        bytes_per_second=float(largest.bytes_per_second),
    )


def _connections() -> Iterator[tuple[str, str, _Counts]]:
    """Yield local and remote address and counts of every connection to another address."""
    try:
        names = os.listdir(_FILES)  # noqa: PTH208 - a third of the time of Path.iterdir
    except OSError:
        return
    for name in names:
        # Other threads open and close files meanwhile.
        with contextlib.suppress(OSError):
            if os.readlink(f"{_FILES}/{name}").startswith("socket:"):  # noqa: PTH115 - as above
                with _same_socket(int(name)) as same:
                    if same.proto == socket.IPPROTO_TCP:
                        yield from _counts_of(same)


def _same_socket(descriptor: int) -> socket.socket:
    """Return a socket of a descriptor of its own for the same connection."""
    own = -1
    try:
        own = os.dup(descriptor)
        # With a type that says it does not block, Python leaves the mode of the connection as it is.
        return socket.socket(-1, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, -1, own)
    except BaseException:  # also what a signal's handler raises
        if own >= 0:
            os.close(own)
        raise


def _counts_of(connection: socket.socket) -> Iterator[tuple[str, str, _Counts]]:
    local, remote = (canonical(name[0]) for name in (connection.getsockname(), connection.getpeername()))
    if local == remote or is_loopback(remote):
        return
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) >= _INFO.size:
        yield local, remote, _Counts(*_INFO.unpack_from(info))
