# SPDX-License-Identifier: Apache-2.0
"""Signals that ask for a stop: who else gets them, and when they end the process after all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from rankwise.health import preemption
from rankwise.health.preemption import listen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass
class Asked:
    """Stands for the session's stop, which needs a job: notes who asked."""

    names: list[str] = field(default_factory=list)
    signals: tuple[str, ...] = ()
    will_notice: bool = True

    @property
    def was_asked(self) -> bool:
        return bool(self.names)

    def ask(self, name: str) -> None:
        self.names.append(name)

    def accept_signals(self, names: Sequence[str]) -> None:
        self.signals = tuple(names)


@pytest.fixture
def own() -> Iterator[list[int]]:
    """A handler of the script's, for SIGUSR1: a list of what it got."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    yield got
    signal.signal(signal.SIGUSR1, before)


def test_the_scripts_own_handler_is_called_too_and_put_back(own: list[int]) -> None:
    handler = signal.getsignal(signal.SIGUSR1)
    asked = Asked()
    restore = listen(asked, ["SIGUSR1"])
    os.kill(os.getpid(), signal.SIGUSR1)
    restore()
    assert (asked.names, own) == (["SIGUSR1"], [signal.SIGUSR1])
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_a_handler_that_the_script_installs_later_stays(own: list[int]) -> None:
    later: list[int] = []
    restore = listen(Asked(), ["SIGUSR1"])
    signal.signal(signal.SIGUSR1, lambda number, _: later.append(number))
    restore()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (own, later) == ([], [signal.SIGUSR1])


def test_a_request_that_came_before_joining_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "early", ["SIGUSR2"])
    stop = preemption.Preemption()
    listen(stop, [])()
    assert stop.was_asked


PROGRAM = """
import os, signal, types
from rankwise.health.preemption import listen

stop = types.SimpleNamespace(
    was_asked=True, will_notice=True, accept_signals=lambda names: None, ask=lambda name: print("asked", flush=True)
)
listen(stop, ["SIGTERM"])
for _ in range(4):
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_the_third_sigterm_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True, timeout=80)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "asked\n" * 2), done.stderr
