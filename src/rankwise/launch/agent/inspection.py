# SPDX-License-Identifier: Apache-2.0
"""Answers what is asked about a job's ranks: by a command in another terminal, or by another machine's launcher.

Each machine answers for its own ranks, and the machine that was asked puts the parts together. Imported by the agent.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from rankwise.errors import LaunchError
from rankwise.launch.controller.link import ControllerLost
from rankwise.launch.inspect.stacks import (
    merged_stacks,
    paces,
    stacks_as_json,
    stacks_here,
    steps_as_json,
)
from rankwise.launch.messages import InspectAnswer, InspectRequest
from rankwise.store import opening

if TYPE_CHECKING:
    from rankwise.health.diagnosis import Answers
    from rankwise.launch.agent.ranks import LocalRanks
    from rankwise.launch.controller.link import AgentLink
    from rankwise.launch.inspect.control_socket import ControlSocket
    from rankwise.launch.messages import Question, StartAttempt

STACKS_SECONDS = 8.0
"""How long the other machines may take to probe their ranks."""
STORE_SECONDS = 3.0
"""How long to look for the job's store."""
STEPS_SECONDS = 2.0
"""How long they may take to read records."""
EVERY_SECONDS = 0.9
"""How often they are asked for their steps at most: ``rankwise top`` is redrawn every second."""


def stacks_of(ranks: LocalRanks) -> Answers:
    """Return what ranks do: all that answer, and those of this machine that do not. Takes up to 8 seconds.

    Raises:
        OSError: the job's store cannot be reached.
    """
    attempt, job = ranks.attempt, ranks.job
    if attempt is None:
        return {}
    opened = opening.connect(*job.address, STORE_SECONDS, secret=job.secret.encode())
    try:
        return stacks_here(
            opened.prefixed(f"attempt/{attempt.attempt}"),
            attempt.world_size,
            processes=ranks.running_processes(),
            stack_files=ranks.stack_files(),
            hostname=socket.gethostname(),
            send_signal=ranks.send_signal,
        )
    finally:
        opened.close()


class InspectService:
    """The service of one launcher, as long as its control socket is open."""

    def __init__(self, control: ControlSocket, ranks: LocalRanks) -> None:
        self._control = control
        self._ranks = ranks
        self._others: dict[Question, OtherMachines] = {
            "stacks": OtherMachines("stacks", limit_seconds=STACKS_SECONDS),
            "steps": OtherMachines("steps", limit_seconds=STEPS_SECONDS),
        }
        self._one_at_a_time = threading.Lock()
        """Held while a user is shown stacks."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is a request."""
        return self._control.fileno()

    def serve(self, link: AgentLink) -> None:
        """Answer a request of a command, without blocking the caller."""
        threading.Thread(target=self._control.serve_one, args=(lambda asked: self._answer(asked, link),)).start()

    def handle(self, message: InspectRequest | InspectAnswer, link: AgentLink | None) -> None:
        """Inspect the ranks here for another machine's launcher, or keep its findings; does not block the caller."""
        if isinstance(message, InspectAnswer):
            self._others[message.question].keep(message)
        elif link is not None:
            threading.Thread(target=self._answer_machine, args=(message, link)).start()

    def steps(self, link: AgentLink, *, every_seconds: float = EVERY_SECONDS) -> dict[str, Any]:
        """Return the pace of the ranks of all machines, as JSON. Waits for the other machines, for 2 seconds at most.

        They are asked once in ``every_seconds`` at most.
        """
        attempt, others = self._ranks.attempt, self._others["steps"]
        if attempt is None:
            return steps_as_json([], [])
        parts: dict[int, Answers] = {}
        with contextlib.suppress(ControllerLost, OSError):
            asked = others.ask(link, attempt, every_seconds=every_seconds)
            parts = others.answers(asked)
        parts[attempt.node_rank] = self._of_this_machine("steps")
        names = attempt.hostnames or tuple(f"node {node}" for node in range(attempt.num_nodes))
        missing = [name for node, name in enumerate(names) if node not in parts]
        return steps_as_json(parts.values(), missing)

    def _answer(self, asked: dict[str, Any], link: AgentLink) -> dict[str, Any]:
        if asked.get("kind") == "steps":
            return self.steps(link)
        attempt = self._ranks.attempt
        if attempt is None:
            raise LaunchError("No rank has been started yet.", do="try again once the other machines have joined")
        if asked.get("kind") == "stacks":
            with self._one_at_a_time:
                return self._stacks(link, attempt)
        kind = asked.get("kind")
        raise LaunchError(f"This launcher does not support the request {kind!r}.", do="rankwise stacks")

    def _stacks(self, link: AgentLink, attempt: StartAttempt) -> dict[str, Any]:
        others = self._others["stacks"]
        asked = others.ask(link, attempt)
        own = self._of_this_machine("stacks")
        return stacks_as_json(merged_stacks([own, *others.answers(asked).values()]), attempt.world_size)

    def _answer_machine(self, request: InspectRequest, link: AgentLink) -> None:
        attempt = self._ranks.attempt
        if attempt is None or attempt.attempt != request.attempt:
            return
        with contextlib.suppress(ControllerLost, OSError):
            answer = InspectAnswer(
                question=request.question,
                number=request.number,
                asker=request.asker,
                node_rank=attempt.node_rank,
                answers=self._of_this_machine(request.question),
            )
            link.send(answer)

    def _of_this_machine(self, question: Question) -> Answers:
        return stacks_of(self._ranks) if question == "stacks" else paces(self._ranks.step_records())


class OtherMachines:
    """The other machines of a job, for one kind of question.

    Args:
        question: what they are asked.
        limit_seconds: how long they may take to answer.
    """

    def __init__(self, question: Question, *, limit_seconds: float) -> None:
        self._question: Question = question
        self._limit_seconds = limit_seconds
        self._changed = threading.Condition()
        self._attempt: StartAttempt | None = None
        self._number = 0
        """The number of the latest request."""
        self._asked_at = 0.0
        self._latest: dict[int, InspectAnswer] = {}
        """What each machine has answered last, by node rank."""

    def ask(self, link: AgentLink, attempt: StartAttempt, *, every_seconds: float = 0.0) -> int:
        """Ask the machines of an attempt, without waiting; return the number of the request for :meth:`answers`.

        They are not asked again within ``every_seconds``: the number is then that of the request before.

        Raises:
            ControllerLost: the controller cannot be reached.
        """
        with self._changed:
            now = time.monotonic()
            if self._attempt is not attempt:
                self._attempt, self._latest = attempt, {}
            elif now - self._asked_at < every_seconds:
                return self._number
            self._number, self._asked_at = self._number + 1, now
            request = InspectRequest(question=self._question, number=self._number, attempt=attempt.attempt)
        # Other threads must not wait while this one sends.
        if attempt.num_nodes > 1:
            link.send(request)
        return request.number

    def keep(self, answer: InspectAnswer) -> None:
        """Keep what another machine has answered."""
        with self._changed:
            known = self._latest.get(answer.node_rank)
            if known is None or known.number <= answer.number:
                self._latest[answer.node_rank] = answer
                self._changed.notify_all()

    def answers(self, number: int) -> dict[int, Answers]:
        """Return what the machines answer to a request, by node rank; waits for them until the limit.

        Those that have not answered by then are left out.
        """
        with self._changed:
            attempt = self._attempt
            num_others = 0 if attempt is None else attempt.num_nodes - 1

            def have_answered() -> bool:
                return attempt is not self._attempt or len(self._since(number)) >= num_others

            self._changed.wait_for(have_answered, max(0.0, self._asked_at + self._limit_seconds - time.monotonic()))
            return self._since(number)

    def _since(self, number: int) -> dict[int, Answers]:
        return {node: answer.answers for node, answer in self._latest.items() if answer.number >= number}
