# SPDX-License-Identifier: Apache-2.0
"""The last collectives of this rank: what was called, from which line of the user's code, its start and its end.

Always on, in memory; read when a wait is too long, or on request. The latest one is also kept in a file that
outlives the process. The file is memory-mapped, so that an entry takes about a microsecond and the kernel keeps it
however the process exits. Written by the rank, read by the launcher.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.health import call_site
from rankwise.torch_private.autograd import in_backward

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    import torch

    from rankwise.health.call_site import CallSite
    from rankwise.health.event_log import StatusPoll


LENGTH = 64
"""How many collectives are kept."""
MOST_NOTED = 1024
"""For how many distinct ones the description is cached."""
LENGTH_BYTES = 1024
"""Size of the file that holds the latest one."""
EVERYONE = "all, 0"
"""The name of the first exchange of all ranks."""
_HEADER = struct.Struct("<dI")
"""When the collective began, in seconds since the epoch; the number of bytes of text that follow."""

_NOWHERE: CallSite = ((lambda: None).__code__, 0)
"""Stands for the call site of a collective that was not called from the user's code."""


@dataclass(slots=True)
class Ticket:
    """One collective this rank takes part in."""

    number: int
    """Its number among all of this rank."""
    what: str
    exchange_id: int = 0
    """Collectives of one exchange have the same order on all ranks; those of different exchanges may interleave."""
    sequence: int = 0
    """Its number within the exchange, the same on every rank."""
    site: CallSite | None = None
    """The line of the user's code that led to it."""
    since: float = field(default_factory=time.monotonic)
    ended: float | None = None
    purpose: str = ""
    """What the user called, if ``what`` does not include it. It may differ between ranks, and is not compared."""

    @property
    def words(self) -> str:
        """Its description for people."""
        return self.purpose or self.what

    def end(self) -> None:
        """Record that it has ended."""
        self.ended = time.monotonic()

    def resume(self) -> None:
        """Record that only one of its waits has ended."""
        self.ended = None


class LastCollective:
    """The writer, for as long as the rank runs.

    Args:
        path: the file, which is created.

    Raises:
        OSError: it cannot be created, or its disk is full.
    """

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A page that the disk has no room for would kill the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, LENGTH_BYTES)
            self._memory = mmap.mmap(descriptor, LENGTH_BYTES)
        finally:
            os.close(descriptor)

    def note(self, words: bytes) -> None:
        """Record the collective that begins now."""
        words = words[: LENGTH_BYTES - _HEADER.size]
        self._memory[: _HEADER.size + len(words)] = _HEADER.pack(time.time(), len(words)) + words


def open_last_collective(path: str) -> LastCollective | None:
    """Return the writer, or ``None`` if there is no path or no space: a rank also trains without it."""
    with contextlib.suppress(OSError):
        return LastCollective(path) if path else None
    return None


def last_collective_path(stack_file: str) -> str:
    """Return the path of a rank's last collective, from that of its stack file; empty if it has none."""
    return f"{stack_file}.last" if stack_file else ""


def read_last_collective(path: str, when: float) -> str:
    """Return a description of the last collective of a rank that exited at time ``when``; empty if it recorded none."""
    try:
        data = Path(path).read_bytes()
        since, length = _HEADER.unpack_from(data)
    except (OSError, struct.error):
        return ""
    words = data[_HEADER.size : _HEADER.size + length].decode("utf-8", "replace")
    return f"in or after {words}, started {max(0.0, when - since):.1f} s before it exited" if words else ""


class FlightRecorder:
    """The last collectives of one rank, and their total number."""

    def __init__(self, last_collective: LastCollective | None = None) -> None:
        self._last_collective = last_collective
        self._thread_id = threading.get_ident()
        self._noted: dict[tuple[str, int, int], tuple[bytes, CallSite]] = {}
        self.recent: deque[Ticket] = deque(maxlen=LENGTH)
        self.last = 0
        """Number of the latest collective."""
        self.step = 0
        """The number of optimizer updates whose gradients have been exchanged."""
        self.sent_bytes = 0
        """What this rank has given to all collectives."""
        self._purpose = ""
        self._counts = [0]
        """How many collectives of each exchange this rank has begun."""
        self._members: list[frozenset[int] | None] = [None]
        self._names = [EVERYONE]

    def new_exchange_id(self, members: Iterable[int] | None = None) -> int:
        """Return the id, on this rank, of a new exchange of ``members``, by default of all ranks.

        Called by: every member, in the same order.
        """
        of = None if members is None else frozenset(members)
        self._names.append(_name_of(of, self._members.count(of)))
        self._counts.append(0)
        self._members.append(of)
        return len(self._counts) - 1

    def name_of(self, exchange_id: int) -> str:
        """Return the name of an exchange, which all its members have for it, and no other one has."""
        return self._names[exchange_id]

    def begun(self) -> dict[str, int]:
        """Return how many collectives of each exchange this rank has begun, by name."""
        return dict(zip(self._names, self._counts, strict=False))

    def is_member(self, rank: int, exchange_id: int) -> bool:
        """Return whether ``rank`` takes part in the collectives of an exchange."""
        members = self._members[exchange_id]
        return members is None or rank in members

    def begin(self, what: str, exchange_id: int = 0, sent_bytes: int = 0) -> Ticket:
        """Record that a collective begins here, to which this rank gives so many bytes."""
        self.sent_bytes += sent_bytes
        self.last = number = self.last + 1
        self._counts[exchange_id] = sequence = self._counts[exchange_id] + 1
        site = call_site.user_call_site()
        if site is None and in_backward():
            # On GPUs hooks run in a thread of torch's, while the training thread is inside backward().
            site = call_site.user_call_site(self._thread_id)
        ticket = Ticket(number, what, exchange_id, sequence, site, purpose=self._purpose)
        self.recent.append(ticket)
        if self._last_collective is not None:
            self._last_collective.note(self._note_of(ticket))
        return ticket

    def note_step(self, number: int) -> None:
        """Record that gradients of optimizer update ``number`` have been exchanged, perhaps one of several models."""
        self.step = max(self.step, number)

    @contextlib.contextmanager
    def uncounted(self) -> Generator[None]:
        """Count no steps inside the block."""
        step = self.step
        try:
            yield
        finally:
            self.step = step

    @contextlib.contextmanager
    def called(self, purpose: str) -> Generator[None]:
        """Have the collectives inside the block record what the user called; see :class:`Ticket`."""
        outer, self._purpose = self._purpose, purpose
        try:
            yield
        finally:
            self._purpose = outer

    def _note_of(self, ticket: Ticket) -> bytes:
        """Return the recorded form of a collective; a training loop calls the same few over and over."""
        code, line = site = ticket.site or _NOWHERE
        # By the code's identity: its hash reads all of it. The call site keeps the code alive, and so its identity.
        key = ticket.words, id(code), line
        known = self._noted.get(key)
        if known is None:
            if len(self._noted) >= MOST_NOTED:
                self._noted.clear()
            note = f"{ticket.words} at {call_site.words(ticket.site)}".encode(errors="replace")
            known = self._noted[key] = note, site
        return known[0]

    def situation(self, waits: dict[int, Ticket], thread_id: int, asked: StatusPoll) -> dict[str, Any]:
        """Return what this rank is doing, as JSON. Called from a thread other than the one that trains.

        Args:
            waits: the collectives that its threads wait for.
            thread_id: of the thread that trains.
            asked: about which collective, and for which stacks.
        """
        exchange, sequence = asked.exchange or EVERYONE, asked.sequence
        recent = self.recent.copy()
        now = time.monotonic()
        own = waits.get(thread_id)
        waiting = own or next(iter(waits.values()), None)
        latest = waiting or (recent[-1] if recent else None)
        begun = self.begun()
        count = begun.get(exchange, 0)
        report: dict[str, Any] = {
            "step": self.step,
            "last": self.last,
            "waiting": waiting is not None,
            "exchange": None if waiting is None else self._names[waiting.exchange_id],
            "count": count,
            "begun": begun,
            "blocked": None if own is None else self._as_blocked(own),
            "what": None if latest is None else latest.words,
            "is_over": latest is None or latest.ended is not None,
            "at": call_site.site_of_thread(thread_id) if latest is None or waiting is None else _at(latest, thread_id),
            "seconds": 0.0 if latest is None else now - (latest.ended or latest.since),
        }
        for ticket in recent:
            if self._names[ticket.exchange_id] == exchange and ticket.sequence == sequence:
                report["entry"] = [ticket.what, call_site.words(ticket.site)]
        report["digests"] = {
            t.sequence: zlib.crc32(t.what.encode()) for t in recent if self._names[t.exchange_id] == exchange
        }
        if asked.stacks == "all" or (asked.stacks == "missing" and count < sequence):
            report["stack"] = call_site.stack_of_thread(thread_id)
        return report

    def _as_blocked(self, ticket: Ticket) -> dict[str, Any]:
        """Return what a wait needs to end."""
        members = self._members[ticket.exchange_id]
        return {
            "exchange": self._names[ticket.exchange_id],
            "sequence": ticket.sequence,
            "members": None if members is None else sorted(members),
        }


def _name_of(members: frozenset[int] | None, number: int) -> str:
    """Return the name of the exchange with this number, from 0, among those of the same members."""
    of = "all" if members is None else f"{len(members)} ranks {zlib.crc32(repr(sorted(members)).encode()):08x}"
    return f"{of}, {number}"


def _at(ticket: Ticket, thread_id: int) -> str:
    # Hooks may run on a torch thread, which has no user code: the training thread is inside backward().
    return call_site.words(ticket.site) if ticket.site is not None else call_site.site_of_thread(thread_id)


def with_kind(what: str, tensor: torch.Tensor) -> str:
    """Add dtype and shape of what a rank sends to a description without them."""
    return what if "[" in what else f"{what}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
