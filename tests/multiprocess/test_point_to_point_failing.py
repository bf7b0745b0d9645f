# SPDX-License-Identifier: Apache-2.0
"""Values that never come, ranks that wait for each other or have left, and wrong calls."""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import rankwise as rw
from rankwise import testing
from rankwise.comm.point_to_point.endpoint import current_endpoint
from rankwise.comm.point_to_point.send_recv import recv, send
from rankwise.errors import ConfigurationError, NotJoined, PeerFailed, PeerMissing

if TYPE_CHECKING:
    from rankwise.world.facts import World


def _both_wait(world: World) -> None:
    recv(1 - world.rank)


def test_two_ranks_that_wait_for_each_other_get_an_error_with_both_lines() -> None:
    results = testing.run_ranks(_both_wait, 2, join_timeout_seconds=2.0, timeout_seconds=20.0)
    errors = [result.error for result in results]
    missing = [error for error in errors if isinstance(error, PeerMissing)]
    assert missing, errors
    assert all(isinstance(error, PeerMissing | PeerFailed) for error in errors)
    # The rank whose limit passes second may find the first one leaving already.
    texts = [str(error) for error in missing if all(f"waiting in recv(source={rank})" in str(error) for rank in (0, 1))]
    assert texts, missing
    assert "timed out after 2" in texts[0]
    assert texts[0].count("in _both_wait") >= 2


def _no_backward(world: World) -> None:
    if world.rank == 0:
        send(torch.ones(2, requires_grad=True), to=1).backward()
    kept = recv(0)
    threading.Event().wait(4)
    del kept


def test_a_backward_that_the_receiver_never_runs_ends_by_the_limit_and_names_it() -> None:
    sender = testing.run_ranks(_no_backward, 2, join_timeout_seconds=2.0, timeout_seconds=20.0)[0]
    assert isinstance(sender.error, PeerMissing)
    text = str(sender.error)
    assert "backward() of send(float32[2], to=1) timed out after 2" in text
    assert "waiting for rank 1" in text
    assert "in _no_backward" in text.partition("stack of rank 1")[2], "says where it is"


def _end(world: World, how: str, ending: int) -> None:
    if world.rank == ending:
        if how == "raise":
            message = "the batch is bad"
            raise ValueError(message)
        if how == "kill":
            testing.kill_self()
        return
    recv(ending)


@pytest.mark.parametrize("ending", [0, 1])
@pytest.mark.parametrize(("how", "kind"), [("raise", PeerFailed), ("kill", PeerMissing), ("leave", PeerMissing)])
def test_a_rank_that_ends_is_named_by_the_ranks_that_wait_for_it(how: str, kind: type[Exception], ending: int) -> None:
    results = testing.run_ranks(_end, 2, how, ending)
    ended, waiting = results[ending], results[1 - ending]
    assert isinstance(waiting.error, kind), waiting.error
    assert "timed out" not in str(waiting.error), "no rank waits for the limit"
    assert f"ank {ending}" in str(waiting.error)
    if how == "raise":
        assert "the batch is bad" in str(waiting.error)
    if how == "kill":
        assert ended.exit_code == -signal.SIGKILL


def _sent_and_left(world: World) -> None:
    if world.rank == 0:
        send(torch.ones(3, requires_grad=True), to=1)
        send("nobody", to=2)
    elif world.rank == 1:
        # Its gradients go to a rank that asks for none, and may have left.
        recv(0).sum().backward()


def test_a_value_that_its_receiver_left_without_is_an_error_of_the_sender() -> None:
    sender, receiver, absent = testing.run_ranks(_sent_and_left, 3)
    assert isinstance(sender.error, PeerMissing)
    assert sender.error.ranks == (2,)
    assert "rank 2 has left" in str(sender.error)
    assert receiver.error is None
    assert absent.error is None


def _sent_too_late(world: World) -> None:
    if world.rank == 1:
        send(recv(0), to=0)
        return
    send("early", to=1)
    recv(1)
    with pytest.raises(PeerMissing, match="rank 1 has left"):
        recv(1)
    send("late", to=1)


def test_a_value_sent_to_a_rank_that_has_left_is_an_error_of_the_sender() -> None:
    sender, receiver = testing.run_ranks(_sent_too_late, 2)
    assert isinstance(sender.error, PeerMissing)
    assert "ank 1 has left before 1 value sent to it arrived" in str(sender.error)
    assert receiver.error is None


def _backward_after_the_sender_left(world: World) -> None:
    if world.rank == 0:
        send(torch.ones(2, requires_grad=True), to=1)
        recv(1)
        return
    received = recv(0)
    send("so that there is a connection", to=0)
    with pytest.raises(PeerMissing, match="rank 0 has left"):
        recv(0)
    received.sum().backward()


def test_gradients_for_a_rank_that_has_left_are_no_loss() -> None:
    assert [result.error for result in testing.run_ranks(_backward_after_the_sender_left, 2)] == [None, None]


def _received_and_left(world: World) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rankwise").addHandler(handler)
    endpoint = current_endpoint("this test")
    if world.rank == 0:
        forgotten = [send(torch.ones(2, requires_grad=True), to=1) for _ in range(2)]
        del forgotten[0]
        for number in range(3):
            send(number, to=1)
        endpoint.wait(
            "gradients", 1, lambda: bool(endpoint.recv_queue.untaken[1] and any(endpoint.recv_queue.gradients.values()))
        )
    else:
        for _ in range(2):
            recv(0).sum().backward()
        recv(0)
        endpoint.wait("the rest", 0, lambda: len(endpoint.recv_queue.values[0]) == 2)
    rw.leave()
    return said


def test_values_and_gradients_that_arrived_and_were_never_used_are_reported_on_arrival() -> None:
    sender, receiver = (result.get() for result in testing.run_ranks(_received_and_left, 2))
    assert any("gradients arrived for 2 of the values that this rank sent, from rank 1" in line for line in sender)
    assert any("2 of the values sent to this rank, by rank 0, were never received" in line for line in receiver)


def _after_leaving(world: World) -> str:
    received = recv(0) if world.rank == 1 else None
    if received is None:
        send(torch.ones(3, requires_grad=True), to=1)
    rw.leave()
    if received is None:
        return ""
    with pytest.raises(NotJoined) as caught:
        received.sum().backward()
    return str(caught.value)


def test_a_backward_behind_the_end_of_the_world_says_so() -> None:
    _, receiver = testing.run_ranks(_after_leaving, 2)
    assert "run backward() before leaving the world" in receiver.get()


def _wrong_calls(world: World) -> list[str]:
    calls: list[Any] = [
        lambda: send(1, to=world.world_size),
        lambda: recv(-1),
        lambda: send(1, to=True),
        lambda: recv("one"),  # type: ignore[arg-type]
        lambda: recv(world.rank),
        lambda: send(1, to=world.rank),
    ]
    if world.world_size > 1:
        other = 1 - world.rank
        calls += [
            lambda: send({1, 2}, to=other),
            lambda: send(10**5000, to=other),
            lambda: send({(1, 2): 3}, to=other),
            lambda: send(np.array([object()]), to=other),
            lambda: send(torch.ones(2, device="meta"), to=other),
            lambda: send(torch.eye(3).to_sparse(), to=other),
        ]
    texts: list[str] = []
    for call in calls:
        with pytest.raises(ConfigurationError) as caught:
            call()
        texts.append(str(caught.value))
    if world.world_size > 1:
        send("and the way is as it was", to=1 - world.rank)
        texts.append(recv(1 - world.rank))
    return texts


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    (alone,) = (result.get() for result in testing.run_ranks(_wrong_calls, 1))
    assert all("world of one" in text for text in alone)
    for rank, result in enumerate(testing.run_ranks(_wrong_calls, 2)):
        texts = result.get()
        for text, words in zip(
            texts,
            (
                "no rank 2",
                "no rank -1",
                "needs the number of a rank",
                "needs the number of a rank",
                f"recv: rank {rank} cannot communicate with itself",
                f"send: rank {rank} cannot communicate with itself",
                "send cannot send builtins.set",
                "an integer of 16610 bits",
                "keys other than strings",
                "NumPy array of object",
                "on meta",
                "sparse",
                "and the way is as it was",
            ),
            strict=True,
        ):
            assert words in text
