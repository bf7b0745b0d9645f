# SPDX-License-Identifier: Apache-2.0
"""Handlers of signals wait while rankwise works, and raise where the script can catch what they raise."""

from __future__ import annotations

import signal

import pytest

from rankwise.auto.replacing import HeldSignals


class Stopped(Exception):
    pass


@pytest.fixture
def handler() -> object:
    """Register a handler that raises, and put back the one before."""

    def stop(number: int, _: object) -> None:
        raise Stopped(number)

    before = signal.signal(signal.SIGUSR1, stop)
    yield stop
    signal.signal(signal.SIGUSR1, before)


def test_a_handler_waits_for_the_end_of_the_outermost_block(handler: object) -> None:
    held, done = HeldSignals(), []

    def work() -> None:
        with held:
            with held:
                signal.raise_signal(signal.SIGUSR1)
                done.append("inner")
            done.append("outer")
        done.append("after")

    with held.replacing(), pytest.raises(Stopped):
        work()
    assert done == ["inner", "outer"]
    assert held.depth == 0


def test_a_handler_runs_at_once_outside(handler: object) -> None:
    held = HeldSignals()
    with held.replacing():
        with held:
            pass
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGUSR1)


def test_a_handler_that_is_set_later_waits_too(handler: object) -> None:
    held, arrived = HeldSignals(), []

    def note(number: int, _: object) -> None:
        arrived.append(number)

    with held.replacing():
        assert signal.signal(signal.SIGUSR1, note) is handler
        assert signal.getsignal(signal.SIGUSR1) is note
        with held:
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            assert not arrived
        assert arrived == [signal.SIGUSR1] * 2
        assert signal.signal(signal.SIGUSR1, signal.SIG_IGN) is note
        signal.raise_signal(signal.SIGUSR1)
    assert arrived == [signal.SIGUSR1] * 2


def test_keyboard_interrupts_wait() -> None:
    held, done = HeldSignals(), []

    def work() -> None:
        with held:
            signal.raise_signal(signal.SIGINT)
            done.append("inside")
        done.append("after")

    with held.replacing(), pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inside"]


def test_an_error_inside_is_the_context_of_what_a_handler_raises(handler: object) -> None:
    held = HeldSignals()

    def work() -> None:
        with held:
            signal.raise_signal(signal.SIGUSR1)
            raise ValueError

    with held.replacing(), pytest.raises(Stopped) as caught:
        work()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_that_raises_keeps_no_other_from_running(handler: object) -> None:
    held, arrived = HeldSignals(), []
    before = signal.signal(signal.SIGUSR2, lambda number, _: arrived.append(number))

    def work() -> None:
        with held:
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)

    try:
        with held.replacing(), pytest.raises(Stopped):
            work()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert arrived == [signal.SIGUSR2]
