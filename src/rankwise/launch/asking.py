# SPDX-License-Identifier: Apache-2.0
"""Answers ``rankwise stacks`` for the agent: looks at the ranks here, and has other machines look at theirs.

Changes nothing. Imported by the agent.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from typing import TYPE_CHECKING, Any

from rankwise import store
from rankwise.errors import LaunchError
from rankwise.launch import looking
from rankwise.launch.link import LinkLost

if TYPE_CHECKING:
    from rankwise.blame import Answers
    from rankwise.launch.control import Control
    from rankwise.launch.link import Link
    from rankwise.launch.ranks import LocalRanks

STORE_SECONDS = 3.0
OTHERS_SECONDS = 8.0
"""How long the other machines have to look at their ranks."""


class Asking:
    """What one launcher is asked from another terminal, or by another machine's launcher that was."""

    def __init__(self, control: Control, ranks: LocalRanks) -> None:
        self._control = control
        self._ranks = ranks
        self._parts: queue.Queue[Answers] = queue.Queue()
        self._one_at_a_time = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor that is readable when somebody asks."""
        return self._control.fileno()

    def serve(self, link: Link) -> None:
        """Answer whoever asks, without keeping the caller waiting."""
        threading.Thread(target=self._control.serve_one, args=(lambda asked: self._answer(asked, link),)).start()

    def heed(self, do: str, message: dict[str, Any], link: Link | None) -> None:
        """Do what another machine's launcher asks: look at the ranks here, or keep what it has seen of its own."""
        if do == "looked":
            self._parts.put(message["part"])
        elif link is not None:
            threading.Thread(target=self._look_for, args=(message["asker"], link)).start()

    def _look_for(self, asker: str, link: Link) -> None:
        with contextlib.suppress(LinkLost, OSError):
            link.send({"do": "answer", "to": asker, "message": {"do": "looked", "part": self.look()}})

    def _answer(self, asked: dict[str, Any], link: Link) -> dict[str, Any]:
        layout = self._ranks.layout
        if asked.get("do") != "stacks":
            raise LaunchError(f"This launcher cannot be asked for {asked.get('do')!r}.", do="rankwise stacks")
        if layout is None:
            raise LaunchError("No rank has been started yet.", do="ask again when the other machines have come")
        with self._one_at_a_time:
            while not self._parts.empty():
                self._parts.get_nowait()
            if layout.num_nodes > 1:
                link.send({"do": "ask", "message": {"do": "look"}})
            parts = [self.look()]
            with contextlib.suppress(queue.Empty):
                parts += [self._parts.get(timeout=OTHERS_SECONDS) for _ in range(layout.num_nodes - 1)]
        return looking.told(looking.merge(parts), layout.world_size)

    def look(self) -> Answers:
        """Return what the ranks do: all that answer, and those of this machine that do not. Takes seconds.

        Raises:
            OSError: the job's store cannot be reached.
        """
        layout, facts = self._ranks.layout, self._ranks.facts
        if layout is None:
            return {}
        opened = store.connect(*facts.store, STORE_SECONDS, secret=facts.secret.encode())
        try:
            return looking.look(
                opened.prefixed(f"attempt/{layout.attempt}"),
                layout.world_size,
                processes=self._ranks.running_processes(),
                stack_files=self._ranks.stack_files(),
                hostname=socket.gethostname(),
                send_signal=self._ranks.send_signal,
            )
        finally:
            opened.close()
