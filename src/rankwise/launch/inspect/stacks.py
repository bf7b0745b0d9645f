# SPDX-License-Identifier: Apache-2.0
"""How ``rankwise stacks`` is answered: what every rank of the running attempt is doing, on all machines of the job.

Ranks are asked over the job's store, and those that do not answer are probed from outside, by the launcher of their
machine; the parts are merged. Changes nothing. Imported by the agent.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwise.errors import LaunchError
from rankwise.health import diagnosis, process_probe, status_poll
from rankwise.launch.agent.controller_link import ControllerLost
from rankwise.launch.inspect.steps import paces
from rankwise.launch.messages import StacksAnswer, StacksRequest
from rankwise.store import opening

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rankwise.health.diagnosis import Answers
    from rankwise.launch.agent.controller_link import ControllerLink
    from rankwise.launch.agent.ranks import LocalRanks
    from rankwise.launch.controller.server import LocalLink
    from rankwise.launch.inspect.control_socket import ControlSocket
    from rankwise.store.values import Store

NOT_JOINED = "running, but it has not joined the world yet or has left it"
MOST_AT_ONCE = 16
STORE_SECONDS = 3.0
OTHERS_SECONDS = 8.0
"""How long the other machines may take to probe their ranks."""


class StacksService:
    """Answers requests to one launcher from another terminal, or from another machine's launcher."""

    def __init__(self, control: ControlSocket, ranks: LocalRanks) -> None:
        self._control = control
        self._ranks = ranks
        self._received: queue.Queue[StacksAnswer] = queue.Queue()
        self._number = 0
        """The number of the latest request."""
        self._one_at_a_time = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is a request."""
        return self._control.fileno()

    def serve(self, link: ControllerLink | LocalLink) -> None:
        """Answer a request, without blocking the caller."""
        threading.Thread(target=self._control.serve_one, args=(lambda asked: self._answer(asked, link),)).start()

    def handle(self, message: StacksRequest | StacksAnswer, link: ControllerLink | LocalLink | None) -> None:
        """Probe the ranks here for another machine's launcher, or keep its findings on its own ranks."""
        if isinstance(message, StacksAnswer):
            self._received.put(message)
        elif link is not None:
            threading.Thread(target=self._look_for, args=(message, link)).start()

    def _look_for(self, request: StacksRequest, link: ControllerLink | LocalLink) -> None:
        with contextlib.suppress(ControllerLost, OSError):
            link.send(StacksAnswer(number=request.number, asker=request.asker, answers=self.look()))

    def _answer(self, asked: dict[str, Any], link: ControllerLink | LocalLink) -> dict[str, Any]:
        attempt = self._ranks.attempt
        if attempt is None:
            raise LaunchError("No rank has been started yet.", do="try again once the other machines have joined")
        if asked.get("kind") == "steps":
            return paces(self._ranks.step_records())
        if asked.get("kind") != "stacks":
            kind = asked.get("kind")
            raise LaunchError(f"This launcher does not support the request {kind!r}.", do="rankwise stacks")
        with self._one_at_a_time:
            self._number += 1
            if attempt.num_nodes > 1:
                link.send(StacksRequest(number=self._number))
            parts = [self.look()]
            with contextlib.suppress(queue.Empty):
                while len(parts) < attempt.num_nodes:
                    answer = self._received.get(timeout=OTHERS_SECONDS)
                    # A machine that was too slow for an earlier request may still answer it.
                    if answer.number == self._number:
                        parts.append(answer.answers)
        return as_json(merge(parts), attempt.world_size)

    def look(self) -> Answers:
        """Return what ranks do: all that answer, and those of this machine that do not. Takes up to 4 seconds.

        Raises:
            OSError: the job's store cannot be reached.
        """
        attempt, job = self._ranks.attempt, self._ranks.job
        if attempt is None:
            return {}
        opened = opening.connect(*job.address, STORE_SECONDS, secret=job.secret.encode())
        try:
            return look(
                opened.prefixed(f"attempt/{attempt.attempt}"),
                attempt.world_size,
                processes=self._ranks.running_processes(),
                stack_files=self._ranks.stack_files(),
                hostname=socket.gethostname(),
                send_signal=self._ranks.send_signal,
            )
        finally:
            opened.close()


def look(
    store: Store,
    world_size: int,
    *,
    processes: Mapping[int, int],
    stack_files: Mapping[int, str],
    hostname: str,
    send_signal: Callable[[int, int], None],
) -> Answers:
    """Ask ranks over the attempt's store, and probe those of this machine that do not answer, by process id."""
    answers = status_poll.call(store, rank=-1, world_size=world_size, asked={"stacks": "all"}, awaited=processes.keys())
    unanswered = {rank: pid for rank, pid in processes.items() if rank not in answers}
    if not unanswered:
        return answers
    joined = {rank for rank in unanswered if status_poll.is_introduced(store, rank)}

    def see(rank: int) -> dict[str, Any]:
        pid, path = unanswered[rank], stack_files.get(rank, "")
        state = process_probe.state_of(pid, process_probe.HELD if rank in joined else NOT_JOINED)
        stack = process_probe.stack_of(pid, path, partial(send_signal, rank))
        return {"silent": state, "stack": stack, "host": hostname}

    with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        return {**answers, **dict(zip(unanswered, threads.map(see, unanswered), strict=True))}


def merge(parts: Iterable[Answers]) -> Answers:
    """Return one view from those of several machines: a rank's own answer takes precedence over a probe of it."""
    merged: Answers = {}
    for part in parts:
        for rank, answer in part.items():
            known = merged.get(int(rank))
            if known is None or "silent" in known:
                merged[int(rank)] = answer
    return merged


def as_json(answers: Answers, world_size: int) -> dict[str, Any]:
    """Return the answer to ``rankwise stacks`` as JSON: the text for people, and the answer of each rank."""
    return {
        "text": text(answers, world_size),
        "world_size": world_size,
        "ranks": {str(rank): answers[rank] for rank in sorted(answers)},
    }


def text(answers: Answers, world_size: int) -> str:
    """Return the table of all ranks, and all their stacks."""
    shown = diagnosis.stacks(answers, range(world_size), is_wanted_of_all=True, most=world_size)
    return f"{diagnosis.table(answers, world_size)}\n{shown}".strip() + "\n"
