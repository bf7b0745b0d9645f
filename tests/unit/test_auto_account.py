# SPDX-License-Identifier: Apache-2.0
"""What the log says of calls under ``--auto`` that were not split."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rankwise.auto import calls
from rankwise.auto.calls import SLOWER, TOLD_AFTER_SECONDS, Account


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(calls, "log", found.append)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(calls.time, "monotonic", lambda: now.seconds)
    return now


def test_a_script_of_which_nothing_is_split_is_told_once_and_why(said: list[str], clock: SimpleNamespace) -> None:
    one = Account(4)
    for reason in ("it prints", SLOWER, SLOWER, SLOWER):
        one.add("Net", reason)
    assert not said
    clock.seconds += TOLD_AFTER_SECONDS + 1
    for _ in range(3):
        one.add("Net", "it prints")
    (text,) = said
    assert text.startswith(
        "auto: no call of a model has been split so far, so 4 ranks are no faster than one: Net runs"
    )
    assert "because splitting it would be slower" in text


def test_nothing_is_told_where_something_was_split(said: list[str], clock: SimpleNamespace) -> None:
    one = Account(2)
    one.add("Net")
    clock.seconds += TOLD_AFTER_SECONDS + 1
    one.add("Net", "it prints")
    assert not said


def test_a_message_is_logged_once_with_its_first_figures(said: list[str], clock: SimpleNamespace) -> None:
    one = Account(2)
    one.say("auto: Net is split", ": 0.7")
    one.say("auto: Net is split", ": 0.6")
    assert said == ["auto: Net is split: 0.7"]
