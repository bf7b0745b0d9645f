# SPDX-License-Identifier: Apache-2.0
"""A wait for a transfer of a pipeline that will not complete."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import pytest
from event_followers import following

from rankwise.errors import PeerMissing
from rankwise.health import collective_timeout
from rankwise.health.event_log import Left
from rankwise.pipeline import link

if TYPE_CHECKING:
    from datetime import timedelta

LIMIT_SECONDS = 10.0


class Stuck:
    """A transfer that nothing completes; a closed connection ends it, or its limit."""

    def __init__(self) -> None:
        self.is_closed = threading.Event()

    def wait(self, limit: timedelta) -> None:
        self.is_closed.wait(min(limit.total_seconds(), LIMIT_SECONDS))
        message = "the connection is closed, or the limit has passed"
        raise RuntimeError(message)


def test_a_transfer_is_aborted_once_its_rank_is_known_to_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "TRANSFER_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(collective_timeout, "FIRST_CHECK_SECONDS", 0.0)
    with following(Left(3, 0, 0)) as detector:
        stuck = Stuck()
        waiter = link.Waiter(detector)
        with pytest.raises(PeerMissing, match="rank 3 has left"):
            waiter.wait([cast("Any", stuck)], detector.ticket("a step of the pipeline"), stuck.is_closed.set)
        assert stuck.is_closed.is_set(), "the limit of torch's wait is not awaited"
