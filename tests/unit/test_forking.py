# SPDX-License-Identifier: Apache-2.0
"""A fork waits until no thread of rankwise is in the middle of anything, and says nothing of those it knows."""

from __future__ import annotations

import os
import signal
import threading
import warnings

import pytest

from rankwise.health import fork_safety


def test_a_fork_waits_for_a_thread_at_work_and_its_child_finds_the_lock_free() -> None:
    lock = threading.Condition()
    fork_safety.hold_during_forks(lock)
    is_at_work, may_end = threading.Event(), threading.Event()
    steps: list[str] = []

    def work() -> None:
        with lock:
            is_at_work.set()
            may_end.wait(20)
            steps.append("the thread has ended its work")

    def child_exit_code() -> None:
        with fork_safety.threads_are_known():
            pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            os._exit(0 if lock.acquire(timeout=10) else 3)
        steps.append("forked")
        steps.append(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))

    worker = threading.Thread(target=work)
    worker.start()
    is_at_work.wait(20)
    forks = threading.Thread(target=child_exit_code)
    forks.start()
    # The fork is on its way and must not be over while the lock is held.
    forks.join(0.2)
    assert steps == []
    may_end.set()
    worker.join(20)
    forks.join(20)
    assert steps == ["the thread has ended its work", "forked", "0"]
    with lock:
        pass  # the parent has it back


def test_a_lock_that_no_longer_exists_is_forgotten() -> None:
    lock = threading.Condition()
    fork_safety.hold_during_forks(lock)
    number = len(fork_safety._locks)
    del lock
    assert len(fork_safety._locks) == number - 1


def test_python_s_warning_is_left_out_and_no_other() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fork_safety.threads_are_known():
            text = "This process (pid=7) is multi-threaded, use of fork() may lead to deadlocks in the child."
            warnings.warn(text, DeprecationWarning, stacklevel=1)
            with pytest.raises(DeprecationWarning):
                warnings.warn("something else", DeprecationWarning, stacklevel=1)
