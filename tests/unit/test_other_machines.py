# SPDX-License-Identifier: Apache-2.0
"""Asking the launchers of a job's other machines: how often, whose answers count, and how long one waits."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from rankwise.launch.agent.inspection import OtherMachines
from rankwise.launch.messages import InspectAnswer, InspectRequest, StartAttempt, decode, encode

if TYPE_CHECKING:
    from rankwise.health.diagnosis import Answers


def attempt_of(number: int, num_nodes: int = 3) -> StartAttempt:
    return StartAttempt(
        run_id="run",
        attempt=number,
        first_rank=0,
        world_size=num_nodes,
        node_rank=0,
        num_nodes=num_nodes,
        ranks_per_node=f"1(x{num_nodes})",
    )


def answer_of(asked: InspectRequest, node: int, text: str = "runs") -> InspectAnswer:
    return InspectAnswer(
        question=asked.question,
        number=asked.number,
        asker="here",
        node_rank=node,
        answers={node: {"it": text}},
    )


class Job:
    """Two other machines, which answer when the test has them answer."""

    def __init__(self, *, limit_seconds: float = 0.0) -> None:
        self.others = OtherMachines("steps", limit_seconds=limit_seconds)
        self.attempt = attempt_of(0)
        self.requests: list[InspectRequest] = []

    def send(self, request: InspectRequest) -> None:
        """Take what a launcher sends to its controller."""
        self.requests.append(request)

    def ask(self, **words: float) -> int:
        """Ask, and return the number of the request."""
        link: Any = self
        return self.others.ask(link, self.attempt, **words)

    def answer(self, place: int, *nodes: int, text: str = "runs") -> None:
        """Answer one of the requests so far."""
        for node in nodes:
            self.others.keep(answer_of(self.requests[place], node, text))


def test_requests_and_answers_survive_the_way() -> None:
    asked = InspectRequest(question="steps", number=3, attempt=1, asker="node")
    for message in (asked, answer_of(asked, 2)):
        assert decode(encode(message), "a test") == message


def test_answers_of_all_machines_are_put_together_and_a_silent_one_is_left_out() -> None:
    job = Job()
    asked = job.ask()
    assert job.others.answers(asked) == {}
    job.answer(0, 2)
    assert job.others.answers(asked) == {2: {2: {"it": "runs"}}}
    job.answer(0, 1)
    assert job.others.answers(asked).keys() == {1, 2}


def test_machines_are_not_asked_again_within_the_time() -> None:
    job = Job()
    numbers = {job.ask(every_seconds=3600) for _ in range(100)}
    job.answer(0, 1, 2)
    assert numbers == {1}
    assert len(job.requests) == 1
    assert job.others.answers(job.ask(every_seconds=3600)).keys() == {1, 2}
    assert job.ask() == 2
    assert len(job.requests) == 2


def test_an_answer_to_an_earlier_request_is_not_shown() -> None:
    job = Job()
    job.ask()
    asked = job.ask()
    job.answer(0, 1, text="late")
    assert job.others.answers(asked) == {}
    job.answer(1, 1, text="now")
    job.answer(0, 1, text="late")
    assert job.others.answers(asked) == {1: {1: {"it": "now"}}}
    assert job.others.answers(job.ask()) == {}


def test_answers_of_another_attempt_are_not_shown() -> None:
    job = Job()
    job.ask(every_seconds=3600)
    job.answer(0, 1)
    job.attempt = attempt_of(1)
    asked = job.ask(every_seconds=3600)
    job.answer(0, 1, 2)
    assert [request.attempt for request in job.requests] == [0, 1]
    assert job.others.answers(asked) == {}


def test_the_last_answer_ends_the_wait() -> None:
    job = Job(limit_seconds=3600)
    asked = job.ask()
    found: list[dict[int, Answers]] = []
    waiting = threading.Thread(target=lambda: found.append(job.others.answers(asked)))
    waiting.start()
    job.answer(0, 1)
    job.answer(0, 2)
    waiting.join(20)
    assert [answers.keys() for answers in found] == [{1, 2}]


def test_a_job_on_one_machine_asks_nobody() -> None:
    job = Job(limit_seconds=3600)
    job.attempt = attempt_of(0, num_nodes=1)
    assert job.others.answers(job.ask()) == {}
    assert job.requests == []
