# SPDX-License-Identifier: Apache-2.0
"""Asks the launchers of a job's other machines one kind of question, through its controller, and keeps their answers.

Imported by the service that answers ``rankwise stacks`` and ``rankwise top``.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from rankwise.launch.messages import InspectRequest

if TYPE_CHECKING:
    from rankwise.health.diagnosis import Answers
    from rankwise.launch.agent.controller_link import ControllerLink
    from rankwise.launch.controller.server import LocalLink
    from rankwise.launch.messages import InspectAnswer, Question, StartAttempt


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

    def ask(self, link: ControllerLink | LocalLink, attempt: StartAttempt, *, every_seconds: float = 0.0) -> int:
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

    def take(self, answer: InspectAnswer) -> None:
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
