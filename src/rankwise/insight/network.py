# SPDX-License-Identifier: Apache-2.0
"""What the hosts of a run have sent to each other, and whether a link between them is slower than the others.

A link is one direction between two hosts. It is judged by how long data was under way for as many bytes, against the
other links: the kernel's counts are compared with one another, not with a speed that a network should have. Since
acknowledgements of one direction wait behind the data of the other, a link is slow only if the kernel's own measure of
its speed, or what it had to send again, differs too. What a rank's TCP connections do not carry is unknown: shared
memory, InfiniBand and other transports. The kernel counts for each connection since it was opened, for all its users:
Gloo, rankwise's own, NCCL without InfiniBand. Linux only; no torch.

Source: ``struct tcp_info`` in linux/tcp.h; busy and limited times since Linux 4.10.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from rankwise.world.network import canonical, is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.insight.step_record import Record, RecordFile

FIRST_SECONDS = 1.0
MOST_SECONDS = 600.0
NOTE = "network"
"""The kind of the notes."""
LEAST_OF_LARGEST = 0.1
"""A connection that has sent less, of what the largest one to the same address has, is left out: its messages are
small, and each is under way for a round trip."""

_FILES = "/proc/self/fd"
_INFO = struct.Struct("=68x I 28x I 16x Q 20x I 4x I Q Q Q")
"""Smoothed round-trip time, retransmitted segments, acknowledged bytes, least round-trip time, segments with data,
bytes per second as last measured, time with data under way, and of that time waiting for room at the receiver. Times
are in microseconds."""
_NO_SAMPLE = 2**32 - 1
"""The least round-trip time before there was one."""
SLOWER = 1.3
"""How many times as long as over the others as many bytes must take over a link, for it to be slow."""
MUCH_SLOWER = 3.0
"""How many times as slow the kernel must have found it; or how many times as much it must have sent again."""
LEAST_RESENT = 0.005
LEAST_SHARE = 0.1
"""A link that carries less, of what the one with most does, is not judged: its messages are small."""
LEAST_SEEN = 0.02
"""If links carry less, of what ranks gave to collectives, the exchange does not use TCP."""

Extent = Literal["one way", "both ways", "from", "to", "host", "all"]
"""Which links are slow: one of them; both between two hosts; all from, to, or from and to one host; or none is slower
than the others, and all are meant."""


# -- what a rank has sent, as its kernel counts it ---------------------------------------------------------


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
    counts = [one for one in connections if one.sent_bytes >= LEAST_OF_LARGEST * largest.sent_bytes]
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


# -- links between hosts ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What one host has sent to another one after the first step."""

    source: str
    destination: str
    num_steps: int
    """How many steps these are."""
    sent_bytes: int
    busy_seconds: float
    """How long data was under way: of the rank where it was longest, since the ranks of a host send at once."""
    pace: float
    """How long one rank's data was under way, in seconds per byte."""
    resent: float
    """Which share of the segments had to be sent again."""
    round_trip_seconds: float
    least_round_trip_seconds: float
    measured_bytes_per_second: float
    """How fast one rank's data has arrived, as the kernel has measured it."""
    is_judged: bool
    """Whether it carries enough for its pace to mean anything."""

    @property
    def bytes_per_second(self) -> float:
        """How fast it sends while it has data under way."""
        return self.sent_bytes / max(self.busy_seconds, 1e-3)

    @property
    def busy_seconds_per_step(self) -> float:
        """How long data was under way in a step."""
        return self.busy_seconds / max(1, self.num_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowNetwork:
    """Which links are slower than the others, or all that are used."""

    extent: Extent
    hosts: tuple[str, ...]
    """Source and destination; or the two hosts, or the one host, that all slow links have in common."""
    slowest: Link
    times_slower: float
    """How many times as long as over the others as many bytes take over the slowest, at least: what it delays is also
    the acknowledgements of the other direction. 1 if no link is slower."""
    is_between_two: bool
    """Whether there is no other link than the two directions between two hosts."""


def links_of(records: Sequence[Record]) -> list[Link]:
    """Return what each host has sent to each other one, as far as it was seen."""
    sent = [(record.facts["hostname"], _traffic_of(record)) for record in records]
    host_of = {one.local: hostname for hostname, traffic in sent for one in traffic}
    between: dict[tuple[str, str], list[_Sent]] = defaultdict(list)
    for source, traffic in sent:
        for one in traffic:
            destination = host_of.get(one.remote, source)
            if destination != source:
                between[source, destination].append(one)
    most = max((sum(one.sent_bytes for one in traffic) for traffic in between.values()), default=0)
    given = max((sum(step.sent_bytes for step in record.steps) for record in records), default=0)
    least = max(LEAST_SHARE * most, LEAST_SEEN * given, 1.0)
    return [_link(hosts, traffic, least) for hosts, traffic in sorted(between.items())]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sent(Traffic):
    """What a rank has sent to one address in some steps."""

    num_steps: int


def _traffic_of(record: Record) -> list[_Sent]:
    """Return what a rank has sent to each address after its first step, which includes the start of the script."""
    noted: dict[tuple[str, str], list[_Sent]] = defaultdict(list)
    for note in record.notes:
        if note["kind"] == NOTE:
            for one in map(from_json, note["traffic"]):
                noted[one.local, one.remote].append(_Sent(num_steps=note["steps"], **asdict(one)))
    return [_since_first(notes) for notes in noted.values()]


def _since_first(notes: Sequence[_Sent]) -> _Sent:
    """Return what was sent to one address after the first note, or up to the only one."""
    first = notes[0]
    # A connection that was closed is no longer counted: its last note is the one with most.
    last = max(notes, key=lambda one: one.sent_bytes)
    last = replace(last, bytes_per_second=median(one.bytes_per_second for one in notes))
    if last.num_steps == first.num_steps:
        return last
    return replace(
        last,
        num_steps=last.num_steps - first.num_steps,
        sent_bytes=last.sent_bytes - first.sent_bytes,
        busy_seconds=max(0.0, last.busy_seconds - first.busy_seconds),
        segments=max(0, last.segments - first.segments),
        retransmitted=max(0, last.retransmitted - first.retransmitted),
    )


def _link(hosts: tuple[str, str], traffic: Sequence[_Sent], least_bytes: float) -> Link:
    sent_bytes = sum(one.sent_bytes for one in traffic)
    largest = max(traffic, key=lambda one: one.sent_bytes)
    return Link(
        source=hosts[0],
        destination=hosts[1],
        num_steps=largest.num_steps,
        sent_bytes=sent_bytes,
        busy_seconds=max(one.busy_seconds for one in traffic),
        pace=sum(one.busy_seconds for one in traffic) / max(1, sent_bytes),
        resent=sum(one.retransmitted for one in traffic) / max(1, sum(one.segments for one in traffic)),
        round_trip_seconds=largest.round_trip_seconds,
        least_round_trip_seconds=min(one.least_round_trip_seconds for one in traffic),
        measured_bytes_per_second=median(one.bytes_per_second for one in traffic),
        is_judged=sent_bytes >= least_bytes,
    )


def slow_network(links: Sequence[Link]) -> SlowNetwork | None:
    """Return which links are slower than the others: all that are used if none is; nothing if none is seen."""
    judged = sorted((link for link in links if link.is_judged), key=lambda link: link.pace)
    if not judged:
        return None
    # Those of one slow host may be most of all links. One in four is not its own, with three hosts or more.
    usual = judged[len(judged) // 4]
    slow = [link for link in judged if _is_slower(link, usual)]
    is_between_two = len({name for link in judged for name in (link.source, link.destination)}) == 2  # noqa: PLR2004
    if not slow:
        hosts = tuple(sorted({name for link in judged for name in (link.source, link.destination)}))
        return SlowNetwork(
            extent="all", hosts=hosts, slowest=judged[-1], times_slower=1.0, is_between_two=is_between_two
        )
    extent, hosts = _extent(slow)
    # A pace of zero is one that is shorter than the kernel's clock resolves.
    times = slow[-1].pace / max(usual.pace, 1e-3 / usual.sent_bytes)
    return SlowNetwork(
        extent=extent, hosts=hosts, slowest=slow[-1], times_slower=max(times, SLOWER), is_between_two=is_between_two
    )


def _is_slower(link: Link, usual: Link) -> bool:
    measured = usual.measured_bytes_per_second >= MUCH_SLOWER * link.measured_bytes_per_second
    resends = link.resent >= max(LEAST_RESENT, MUCH_SLOWER * usual.resent)
    return link.pace > SLOWER * usual.pace and (measured or resends)


def _extent(slow: Sequence[Link]) -> tuple[Extent, tuple[str, ...]]:
    """Return what slow links, the slowest last, have in common, and the names of these hosts."""
    sources, destinations = {link.source for link in slow}, {link.destination for link in slow}
    common = set.intersection(*({link.source, link.destination} for link in slow))
    if len(slow) == 1 or not common:
        return "one way", (slow[-1].source, slow[-1].destination)
    if len(sources) == 1:
        return "from", tuple(sources)
    if len(destinations) == 1:
        return "to", tuple(destinations)
    return ("both ways" if len(common) > 1 else "host"), tuple(sorted(common))
