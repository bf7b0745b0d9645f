# SPDX-License-Identifier: Apache-2.0
"""What the controller writes into the job's store for the ranks of one attempt, and reads from it.

Events in the ranks' event logs, and marks that end waiting for ranks that have exited before they joined. Ranks that
leave a world and join another begin a new log. Runs on the loop that serves the store. Imported by the controller's
server.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rankwise.health.event_log import EXPENDABLE_KEY, WORLDS_KEY, Event, post, world_prefix
from rankwise.store.bootstrap import ENDED, rank_address_key

if TYPE_CHECKING:
    from rankwise.store.keys import Keys

TORCH_PREFIX = "torch/"
"""Prefix of the keys of the group that ranks open through torch's own ``env://``, among those of an attempt."""


def torch_rank_key(rank: int) -> str:
    """Return the key that a rank sets, among those of an attempt, when it starts to open torch's own group."""
    return f"rankwise/torch_ranks/{rank}"


class AttemptKeys:
    """The keys of one attempt among those of the job, in each world that its ranks have joined."""

    def __init__(self, of_job: Keys, attempt: int) -> None:
        self.attempt = attempt
        self._keys = of_job
        self._prefix = f"attempt/{attempt}/"
        self._num_worlds = 1
        self._posted: list[Event] = []
        self._ended: list[int] = []

    def post(self, event: Event) -> None:
        """Notify the ranks of the attempt of an event, whichever world they are in."""
        self.follow()
        self._posted.append(event)
        for number in range(self._num_worlds):
            post(_WorldKeys(self._keys, self._prefix_of(number)), event)

    def note_ended(self, rank: int) -> None:
        """Record that a rank has exited without an error."""
        self.follow()
        self._ended.append(rank)
        if not self._keys.check([self._prefix + torch_rank_key(rank)]):
            why = f"rank {rank} exited without an error before it called init_process_group()"
            self._keys.give_up(self._prefix + TORCH_PREFIX, rank, why)
        for number in range(self._num_worlds):
            self._mark(number, rank)

    def follow(self) -> None:
        """Repeat earlier events and marks for ranks that have joined another world, where they apply as well."""
        num_worlds = self._num_rejoined() + 1
        for number in range(self._num_worlds, num_worlds):
            for event in self._posted:
                post(_WorldKeys(self._keys, self._prefix_of(number)), event)
            for rank in self._ended:
                self._mark(number, rank)
        self._num_worlds = num_worlds

    def optional_ranks(self) -> list[int]:
        """Return the ranks without which their newest world continues, as its ranks have declared."""
        declared = self._keys.peek(self._prefix_of(self._num_rejoined()) + EXPENDABLE_KEY)
        return [] if declared is None else json.loads(declared)

    def _mark(self, number: int, rank: int) -> None:
        # A rank that has joined has an address there already, and keeps it.
        self._keys.compare_set(self._prefix_of(number) + rank_address_key(rank), b"", ENDED.encode())

    def _num_rejoined(self) -> int:
        return int(self._keys.peek(self._prefix + WORLDS_KEY) or 0)

    def _prefix_of(self, number: int) -> str:
        return f"{self._prefix}{world_prefix(number)}/" if number else self._prefix


class _WorldKeys:
    """The keys of one world, as ``event_log.post`` writes them."""

    def __init__(self, of_job: Keys, prefix: str) -> None:
        self._keys = of_job
        self._prefix = prefix

    def set_if_absent(self, key: str, value: str) -> bool:
        data = value.encode()
        return self._keys.compare_set(self._prefix + key, b"", data) == data
