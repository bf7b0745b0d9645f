# SPDX-License-Identifier: Apache-2.0
"""What the launcher writes into, and reads from, the event logs of the ranks of one attempt.

Ranks that leave a world and join another begin a new log. Lives on the loop that serves the job's store. Imported by
the launcher's serving end.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rankwise.events import EXPENDABLE_KEY, WORLDS_KEY, post, world_prefix

if TYPE_CHECKING:
    from rankwise.store.keys import Keys


class EventLogs:
    """The logs of one attempt, one for each world that its ranks have joined.

    Args:
        of_job: the keys of the job.
        attempt: its number.
    """

    def __init__(self, of_job: Keys, attempt: int) -> None:
        self.attempt = attempt
        self._keys = of_job
        self._prefix = f"attempt/{attempt}/"
        self._posted: list[dict[str, Any]] = []
        self._parts = [_Part(of_job, self._prefix)]

    def post(self, event: dict[str, Any]) -> None:
        """Tell the ranks of the attempt, whichever world they are in, of an event."""
        self.follow()
        self._posted.append(event)
        for part in self._parts:
            post(part, event)

    def follow(self) -> None:
        """Tell the ranks that have joined another world what was posted before: it is as true there."""
        for number in range(len(self._parts), self._num_rejoined() + 1):
            part = _Part(self._keys, f"{self._prefix}{world_prefix(number)}/")
            for event in self._posted:
                post(part, event)
            self._parts.append(part)

    def expendable(self) -> list[int]:
        """Return the ranks without which their newest world goes on, as its ranks have declared."""
        number = self._num_rejoined()
        world = f"{self._prefix}{world_prefix(number)}/" if number else self._prefix
        declared = self._keys.peek(world + EXPENDABLE_KEY)
        return [] if declared is None else json.loads(declared)

    def _num_rejoined(self) -> int:
        return int(self._keys.peek(self._prefix + WORLDS_KEY) or 0)


class _Part:
    """The keys of one world, as ``events.post`` writes them."""

    def __init__(self, of_job: Keys, prefix: str) -> None:
        self._keys = of_job
        self._prefix = prefix

    def set_if_absent(self, key: str, value: str) -> bool:
        data = value.encode()
        return self._keys.compare_set(self._prefix + key, b"", data) == data
