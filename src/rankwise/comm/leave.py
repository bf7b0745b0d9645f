# SPDX-License-Identifier: Apache-2.0
"""Leaving the world, in order or with an error, and what the end of the process does to it.

The only place where a process group closes. Knows nothing of how the world was joined.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
from typing import TYPE_CHECKING

import torch.distributed as dist

from rankwise import meter
from rankwise.comm import optimizer_steps, step_hooks
from rankwise.comm.session import Session, annotate, current_or_none, set_current
from rankwise.comm.world_group import forget_interface, is_opening
from rankwise.health.diagnosis import forked_from, world_left
from rankwise.health.traceback_folds import formatted
from rankwise.log import speak_as
from rankwise.torch_private.groups import abort_groups, leak_groups
from rankwise.world.environments.process import launcher, note_echo

if TYPE_CHECKING:
    from types import TracebackType

    from rankwise.errors import RankwiseError


def leave() -> None:
    """Leave the world: finish pending work, close the process group.

    Called by: every rank. Does nothing when no world is joined. The end of ``with join()`` and a normal end
    of the process call it; processes forked from a rank leave nothing. A model that a strategy has
    distributed can no longer train: its collectives raise :class:`rankwise.errors.NotJoined`.
    """
    session = current_or_none()
    if session is None:
        return
    if session.process != os.getpid():
        leak_groups()  # The threads that would close them are the parent's.
        return
    try:
        for action in reversed(session.leaving):
            action()
    except BaseException as error:
        fail(error)
        raise
    if session.detector is not None:
        session.detector.leave(wait_for_peers=session.serves_store)
    _close(session, failed=False)


def fail(error: BaseException) -> RankwiseError | None:
    """Notify every rank that this one ends with ``error``, and abandon the world.

    Called by: the failing rank only; the end of ``with join()`` and an uncaught exception call it.

    Returns:
        The error of another rank that failed first, if ``error`` is only its consequence on this rank.
    """
    session = current_or_none()
    if session is None or session.process != os.getpid():
        return None
    reason = None
    if session.detector is not None:
        session.detector.note_raised()
        reason = session.detector.reason_of(error)
        error = reason or error
        if error is session.detector.error:
            note_echo()
            session.detector.leave(wait_for_peers=session.serves_store)
        else:
            annotate(error)
            session.detector.fail(type(error).__name__, formatted(error), wait_for_peers=session.serves_store)
    else:
        annotate(error)
    if not launcher():
        meter.note_failure(error, session.world.rank)
    _close(session, failed=True)
    return reason


def _close(session: Session, *, failed: bool) -> None:
    set_current(None)
    for action in session.ending:
        action()
    optimizer_steps.stop()
    step_hooks.uninstall()
    meter.stop()
    forget_interface()
    # The process is about to exit, and another signal must not make it look killed.
    if not session.preemption.has_stopped:
        session.on_close()
    session.preemption.close()
    speak_as("", is_rank_zero=True)
    for part in session.parts.values():
        part.close()
    if session.exchange is not None:
        session.exchange.close()
    _close_groups(session, failed=failed)
    if session.detector is not None and session.detector.error is None:
        # For models and groups that still exist: none of their collectives may wait for ranks that have left.
        session.detector.refuse_all(world_left())
    if session.detector is not None:
        session.detector.store.close()
    if session.store is not None:
        session.store.close()


def _close_groups(session: Session, *, failed: bool) -> None:
    if not dist.is_initialized():
        return
    if failed or (
        session.detector is not None and (session.detector.error is not None or session.detector.has_lost_ranks)
    ):
        if session.detector is not None and session.detector.queue is not None:
            abort_groups()  # The process could not exit while its device waits.
        leak_groups()
    else:
        dist.destroy_process_group()


# -- the end of the process -----------------------------------------------------------------------------------

_hook_numbers = itertools.count()
"""How often its exit has been hooked: only the first time counts, which need not be that of the first join()."""


def hook_exit() -> None:
    """Leave the world when the process exits; notify the other ranks of an uncaught exception, and show it folded.

    Where the hook of ``sys`` is not Python's own (a test runner's, a debugger's, the launcher's), that one shows it.
    """
    if next(_hook_numbers):
        return
    atexit.register(_leave_at_exit)
    os.register_at_fork(after_in_child=_detach_fork)
    previous = sys.excepthook

    def report_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        reason = None
        with contextlib.suppress(Exception):
            reason = fail(error)
        shown = error.with_traceback(trace) if reason is None else reason.with_traceback(trace)
        if previous is not sys.__excepthook__ or not _show(shown):
            previous(type(shown), shown, trace)
        if issubclass(kind, Exception) and is_opening():
            _end_without_python()

    sys.excepthook = report_and_show


def _show(error: BaseException) -> bool:
    """Write an exception to stderr; return whether that was possible."""
    with contextlib.suppress(Exception):
        sys.stderr.write(formatted(error))
        sys.stderr.flush()
        return True
    return False


def _end_without_python() -> None:
    """End this process as after an uncaught error, but for the end of Python itself.

    A thread that returns from torch's C++ meanwhile would be ended there by Python, and abort the process.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # noqa: SLF001 - there is no public name
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _detach_fork() -> None:
    """Keep a forked process from using what its parent still uses. Called in the child."""
    session = current_or_none()
    if session is not None and session.detector is not None:
        session.detector.refuse_all(forked_from(session.world))


def _leave_at_exit() -> None:
    try:
        leave()
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not end as a success
        try:
            sys.excepthook(type(error), error, error.__traceback__)  # as an exception of the script
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(1)  # an exception in atexit would leave the exit code 0
