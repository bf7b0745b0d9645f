# SPDX-License-Identifier: Apache-2.0
"""Gradients that are computed on several streams of a device are copied after all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.replicate import bucket
from rankwise.replicate.bucket import Weights

if TYPE_CHECKING:
    import pytest


class Stream:
    """A stream that notes what it waits for."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self._events = events

    def wait_stream(self, other: Stream) -> None:
        self._events.append(f"{self.name} waits for {other.name}")


class Gradient(torch.Tensor):
    """A gradient that notes which streams use it."""

    events: list[str]

    def record_stream(self, s: Any) -> None:
        self.events.append(f"used on {s.name}")


class Channel:
    """A channel that notes when the body is copied, as far as the factor shows."""

    def __init__(self, events: list[str]) -> None:
        self.body = self.result = torch.zeros(4)
        self.claim = lambda: None
        self._events = events

    def factor(self, share: float) -> float:
        self._events.append("copied")
        return share

    def start(self, *_: object) -> None:
        self._events.append("sent")


def _sent_from(monkeypatch: pytest.MonkeyPatch, arrivals: list[str], sending: str) -> list[str]:
    events: list[str] = []
    streams = {name: Stream(name, events) for name in {*arrivals, sending}}
    current = [streams[sending]]
    monkeypatch.setattr(bucket, "stream_query", lambda _: lambda: current[0])
    monkeypatch.setattr(bucket, "current_stream", lambda _: current[0])
    parameters = [torch.zeros(2, requires_grad=True) for _ in arrivals]
    one = bucket.Bucket([0, 1], parameters, Channel(events), bucket.Scratch())  # type: ignore[arg-type]
    for parameter, name in zip(parameters, arrivals, strict=True):
        current[0] = streams[name]
        parameter.grad = torch.ones(2).as_subclass(Gradient)
        Gradient.events = events
        one.note_stream()
    current[0] = streams[sending]
    one.send(Weights(1.0, 1.0))
    return events


def test_the_sending_stream_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    events = _sent_from(monkeypatch, ["side", "main"], "main")
    assert events == ["main waits for side", "used on main", "used on main", "copied", "sent"]


def test_one_stream_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _sent_from(monkeypatch, ["main", "main"], "main") == ["copied", "sent"]
