# SPDX-License-Identifier: Apache-2.0
"""The messages between the machines of a job: each comes through whole; all else is an error that names the sender."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from rankwise.launch import messages
from rankwise.launch.messages import Hello, Message, MessageError, Node, RankFailed, StopAttempt, decode, encode
from rankwise.launch.options import LaunchOptions
from rankwise.launch.report.failure import Failure

LONG = b'{"kind": "' + b"x" * 500 + b'"}'


def example(kind: Any) -> Any:
    """Return a value of a type that a field has; nothing of it is a default."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is LaunchOptions:
        return LaunchOptions(num_ranks=3, nodes=(1, 2), rendezvous=("a", 1), check=True)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{one.name: example(hints[one.name]) for one in fields(kind)})
    simple: dict[Any, Any] = {int: 7, str: "ä\n", float: 0.25, bool: True, Any: {"a": [1, None]}}
    if kind in simple:
        return simple[kind]
    if origin is Literal:
        return inner[-1]
    if origin is dict:
        return {example(inner[0]): example(inner[1])}
    if origin is tuple:
        return tuple(example(one) for one in inner if one is not Ellipsis)
    return example(inner[0])


@pytest.mark.parametrize("kind", sorted(messages._KINDS.values(), key=lambda kind: kind.__name__))
def test_every_message_comes_through_whole(kind: type[Message]) -> None:
    message = example(kind)
    assert decode(encode(message), "a") == message
    least = {
        one.name: getattr(message, one.name) for one in fields(kind) if one.default is one.default_factory is MISSING
    }
    assert decode(encode(kind(**least)), "a") == kind(**least)
    assert b"\n" not in encode(message)


def test_a_time_that_is_no_time_comes_through() -> None:
    failed = Failure(
        rank=0, type="lost", message="", traceback="", time=math.inf, secondary=False, exit_code=1, how="lost"
    )
    message = RankFailed(attempt=0, failure=failed)
    assert decode(encode(message), "a") == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"kind": "Run"}',
        b'{"kind": ["StopAttempt"]}',
        b'{"kind": "StopAttempt"}',
        b'{"kind": "StopAttempt", "attempt": 0}',
        b'{"kind": "StopAttempt", "attempt": "0", "settle_seconds": 0}',
        b'{"kind": "StopAttempt", "attempt": true, "settle_seconds": 0}',
        b'{"kind": "StopAttempt", "attempt": 0, "settle_seconds": 0, "more": 1}',
        b'{"kind": "RanksDeparted", "attempt": 0, "runs": [[0, null]]}',
        b'{"kind": "Ready", "rendezvous": ["a", 1, 2]}',
        b'{"kind": "RanksEnded", "attempt": 0, "report": {"ends": {"a": "b"}}}',
        b"[" * 100_000,
        LONG,
    ],
)
def test_anything_else_is_an_error_that_names_the_sender(data: bytes) -> None:
    with pytest.raises(
        MessageError, match="gpu-1 sent a message that this version of rankwise does not know"
    ) as caught:
        decode(data, "gpu-1")
    assert len(caught.value.evidence or "") < 300


def test_a_number_without_a_fraction_is_a_number_of_seconds() -> None:
    assert decode(b'{"kind": "StopAttempt", "attempt": 0, "settle_seconds": 5}', "a") == StopAttempt(
        attempt=0, settle_seconds=5.0
    )


def test_a_launcher_of_a_later_version_is_understood_well_enough_to_be_refused() -> None:
    node = {"node_id": "b", "hostname": "b", "num_ranks": 1, "job": {"rankwise": "9"}, "of a later version": 1}
    data = json.dumps({"kind": "Hello", "node": node}).encode()
    known = Node(node_id="b", hostname="b", num_ranks=1, job={"rankwise": "9"})
    assert decode(data, "b") == Hello(node=known)


def test_no_field_has_the_name_that_tells_messages_apart() -> None:
    assert [kind.__name__ for kind in messages._KINDS.values() if any(one.name == "kind" for one in fields(kind))] == []
