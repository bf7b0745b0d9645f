# SPDX-License-Identifier: Apache-2.0
"""The last collectives of this rank: what, from which line of the user's, when begun and when ended.

Always on. Kept in memory only; read when a wait becomes too long, or somebody asks. Imported by watch and roll_call.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankwise import places

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from rankwise.last_call import LastCall
    from rankwise.places import Place

LENGTH = 64
"""How many collectives are remembered."""
MOST_NOTED = 1024
"""Of how many different ones the words are kept."""


_NOWHERE: Place = ((lambda: None).__code__, 0)
"""Stands for the place of a collective that no line of the user's led to."""


@dataclass(slots=True)
class Ticket:
    """One collective this rank takes part in."""

    number: int
    """Among all of this rank."""
    what: str
    channel: int = 0
    """Collectives of one channel have one order on all ranks; those of two may change places."""
    sequence: int = 0
    """Its number within the channel, the same on every rank."""
    place: Place | None = None
    """The user's line that led to it."""
    since: float = field(default_factory=time.monotonic)
    ended: float | None = None
    purpose: str = ""
    """What the user has called, where ``what`` does not say it. It may differ between ranks, and is not compared."""

    @property
    def words(self) -> str:
        """What it is called where a person reads it."""
        return self.purpose or self.what


class Record:
    """The last collectives of one rank, and how many there were."""

    def __init__(self, last_call: LastCall | None = None) -> None:
        self._last_call = last_call
        self._noted: dict[tuple[str, int, int], tuple[bytes, Place]] = {}
        self.recent: deque[Ticket] = deque(maxlen=LENGTH)
        self.last = 0
        """Number of the latest collective."""
        self.step = 0
        """Optimizer updates whose gradients have been exchanged."""
        self.purpose = ""
        """Of the collectives to come; see :class:`Ticket`."""
        self.counts = [0]
        """How many collectives of each channel this rank has begun."""
        self._members: list[frozenset[int] | None] = [None]

    def open_channel(self, members: Iterable[int] | None = None) -> int:
        """Return a new channel. Called by: every rank, in the same order.

        Args:
            members: the ranks whose collectives it counts; default: all.
        """
        self.counts.append(0)
        self._members.append(None if members is None else frozenset(members))
        return len(self.counts) - 1

    def is_member(self, rank: int, channel: int) -> bool:
        """Return whether ``rank`` takes part in the collectives of a channel."""
        members = self._members[channel]
        return members is None or rank in members

    def begin(self, what: str, channel: int = 0) -> Ticket:
        """Note that a collective begins here."""
        self.last = number = self.last + 1
        self.counts[channel] = sequence = self.counts[channel] + 1
        ticket = Ticket(number, what, channel, sequence, places.user_place(), purpose=self.purpose)
        self.recent.append(ticket)
        if self._last_call is not None:
            self._last_call.note(self._note_of(ticket))
        return ticket

    def _note_of(self, ticket: Ticket) -> bytes:
        """Return what is noted of a collective; a training loop calls the same few over and over."""
        code, line = place = ticket.place or _NOWHERE
        # By the code's identity: its hash goes through all of it. The place keeps the code, and so its identity.
        key = ticket.words, id(code), line
        known = self._noted.get(key)
        if known is None:
            if len(self._noted) >= MOST_NOTED:
                self._noted.clear()
            words = f"{ticket.words} at {places.words(ticket.place)}".encode(errors="replace")
            known = self._noted[key] = words, place
        return known[0]

    def situation(self, waiting: Ticket | None, thread_id: int, asked: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank is doing, as JSON. Called from another thread than the one that does it.

        Args:
            waiting: the collective it waits for.
            thread_id: of the thread that trains.
            asked: ``channel`` and ``sequence`` of the collective that is asked about, or 0; ``stacks``: ``"missing"``
                for the stack of a rank that has not come to it, ``"all"`` for every rank's.
        """
        channel, sequence = int(asked.get("channel", 0)), int(asked.get("sequence", 0))
        recent = self.recent.copy()
        now = time.monotonic()
        latest = waiting or (recent[-1] if recent else None)
        counts = self.counts
        count = counts[channel] if channel < len(counts) else 0
        told: dict[str, Any] = {
            "step": self.step,
            "last": self.last,
            "waiting": waiting is not None,
            "channel": None if waiting is None else waiting.channel,
            "count": count,
            "what": None if latest is None else latest.words,
            "is_over": latest is None or latest.ended is not None,
            "at": places.place_of_thread(thread_id) if latest is None or waiting is None else _at(latest, thread_id),
            "seconds": 0.0 if latest is None else now - (latest.ended or latest.since),
        }
        for ticket in recent:
            if ticket.channel == channel and ticket.sequence == sequence:
                told["entry"] = [ticket.what, places.words(ticket.place)]
        told["digests"] = {t.sequence: zlib.crc32(t.what.encode()) for t in recent if t.channel == channel}
        if asked.get("stacks") == "all" or (asked.get("stacks") == "missing" and count < sequence):
            told["stack"] = places.stack_of_thread(thread_id)
        return told


def _at(ticket: Ticket, thread_id: int) -> str:
    # Hooks may run on a thread of torch's, which has no line of the user's: backward stands in the one that trains.
    return places.words(ticket.place) if ticket.place is not None else places.place_of_thread(thread_id)


def with_kind(what: str, tensor: torch.Tensor) -> str:
    """Add dtype and shape of what a rank sends to words that do not tell them."""
    return what if "[" in what else f"{what}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
