# SPDX-License-Identifier: Apache-2.0
"""Stopping a job early, at one step that all ranks agree on, with its state saved.

Counts the steps of this rank and agrees with the others through the job's event log. Saves nothing itself; never
touches the process group. Signals that ask a rank without an agent to stop (Slurm's before its time limit) set a flag
and call the previous handler; they never end a rank that has something to save. Used by ``join``, the loader and the
checkpointer.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from rankwise.errors import PeerMissing, RankwiseError, fold_ranks
from rankwise.health.event_log import Event, Left, StopAt, StopRequested, post
from rankwise.log import log, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from weakref import WeakMethod

    from rankwise.store.client import Store

STOPPED_EXIT_CODE = 75
"""Exit code of a rank that has stopped early and saved: ``EX_TEMPFAIL`` of sysexits.h, "try again later"."""
COUNTS_SLICE_SECONDS = 0.2
"""How long a rank waits for the others' counts before it checks whether they still run."""
INSISTENT = 3
"""The SIGTERM that ends a process at once: Slurm itself sends two before SIGKILL."""

early: list[str] = []
"""Signals received before the rank joined."""


def note_early(number: int, _frame: object) -> None:
    """Handle a signal in a rank that has not joined yet; ``join()`` acts on it."""
    early.append(signal.Signals(number).name)


class StepSource:
    """A token for what a training loop takes its steps from: it asks before each step whether to stop."""


@dataclass(frozen=True, slots=True)
class _Save:
    """The function that saves the state of a loop, and the loop's source of steps."""

    source: StepSource
    run: Callable[[], object]
    is_restored: bool
    """Whether the job would resume from what it saves."""


class _StopAgreement:
    """The boundary at which all ranks stop, found by the main thread and the failure detector's, with one lock.

    A boundary is a point between two steps that every rank passes the same number of times. A rank asked to stop
    posts how many it has passed; the maximum plus one is the first that every rank has yet to reach.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        store: Store | None,
        timeout_seconds: float,
        error: Callable[[], RankwiseError | None],
    ) -> None:
        self.reason: str | None = None
        """Why the job stops, once all ranks know that it was asked to."""
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._timeout_seconds = timeout_seconds
        self._error = error
        self._changed = threading.Condition()
        self._passed = 0
        self._last: int | None = None
        self._has_departures = False
        self._lost: set[int] = set()

    def close(self) -> None:
        """Drop the store. Called when the world is left."""
        self._store = None
        self._error = lambda: None

    # -- the main thread ---------------------------------------------------------------------------

    def request(self, reason: str) -> None:
        """Ask all ranks to stop, unless one has asked before."""
        if self._store is None:
            self.reason, self._last = reason, self._passed + 1
        elif self._store.add("rankwise/stop/asked", 1) == 1:
            post(self._store, StopRequested(reason, self._rank))

    def pass_boundary(self, *, alone: bool) -> bool:
        """Count a boundary; return whether it is the one to stop at: with ``alone``, the next one after the request."""
        with self._changed:
            self._passed += 1
            if self.reason is None or alone:
                return self.reason is not None
            self._wait_until_known()
            return self._passed == self._last

    def _wait_until_known(self) -> None:
        started = time.monotonic()
        while not self._changed.wait_for(lambda: self._last is not None, COUNTS_SLICE_SECONDS):
            error = self._error()
            if error is not None:
                raise error
            if self._has_departures:
                # It finished before it could be asked: the job is nearly done.
                return
            if time.monotonic() - started > self._timeout_seconds:
                raise self._missing()

    def _missing(self) -> PeerMissing:
        store = self._store
        awaited = set(range(self._world_size)) - self._lost
        ranks = [rank for rank in sorted(awaited) if store is not None and not store.check(_count_of(rank))]
        return PeerMissing(
            f"Stopping timed out after {self._timeout_seconds:.0f} s waiting for {fold_ranks(ranks)}.",
            ranks=ranks,
            do="check the missing rank's output",
        )

    # -- the failure detector's thread, with its own connection to the store -----------------------

    def note_departure(self) -> None:
        """Record that a rank has left: it will post no count."""
        self._has_departures = True

    def settle(self, boundary: int) -> None:
        """Record at which boundary all ranks stop."""
        with self._changed:
            self._last = boundary
            self._changed.notify_all()

    def begin(self, reason: str) -> int | None:
        """Record why the job stops; return how many boundaries this rank has passed, or ``None`` if it was known."""
        with self._changed:
            if self.reason is not None:
                return None
            self.reason = reason
            return self._passed

    def post_count(self, store: Store, passed: int, next_event: int) -> None:
        """Post how many boundaries this rank has passed; the last rank to post knows where all can stop."""
        store.set(_count_of(self._rank), str(passed))
        self._agree_if_counted(store, 1, next_event)

    def lose(self, store: Store, rank: int, next_event: int) -> None:
        """Record that the job continues without ``rank``: its count is not waited for."""
        self._lost.add(rank)
        if self.reason is not None and self._last is None:
            self._agree_if_counted(store, 0, next_event)

    def _agree_if_counted(self, store: Store, number: int, next_event: int) -> None:
        """Add ``number`` counts; once every remaining rank has posted its count, post where all can stop."""
        present = sorted(set(range(self._world_size)) - self._lost)
        if store.add("rankwise/stop/counted", number) < len(present):
            return
        # A lost rank may be among those that posted a count.
        if self._lost and not all(store.check(_count_of(rank)) for rank in present):
            return
        if store.add("rankwise/stop/agreed", 1) == 1:
            counts = [int(store.get(_count_of(rank), self._timeout_seconds)) for rank in present]
            post(store, StopAt(max(counts) + 1), next_event)


def _count_of(rank: int) -> str:
    return f"rankwise/stop/passed/{rank}"


class Preemption:
    """One rank's early stop, from join to leave: what asks for it, what is saved, and where all ranks stop."""

    def __init__(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
        timeout_seconds: float = 0.0,
        error: Callable[[], RankwiseError | None] = lambda: None,
    ) -> None:
        """Start with no boundary passed.

        In a world of one there is no ``store``, else it is the main thread's connection. A rank waits for
        ``timeout_seconds`` for the others' counts; ``error`` returns the error that ends the job, if any.
        """
        self.has_stopped = False
        self.signals: tuple[str, ...] = ()
        """The signals that ask this process to stop, if any; worker processes may receive them too."""
        self._agreement = _StopAgreement(
            rank=rank, world_size=world_size, store=store, timeout_seconds=timeout_seconds, error=error
        )
        self._thread = threading.get_ident()
        self._requested: str | None = None
        self._is_asked_by_hand = False
        self._has_warned = False
        self._is_passive = False
        self._stops_alone = False
        self._saves: dict[str, _Save] = {}
        self._mid_step: list[WeakMethod[Callable[[], bool]]] = []

    # -- what asks to stop -------------------------------------------------------------------------

    def ask(self, reason: str) -> None:
        """Have the job stop. Sets a flag only, so that a signal handler may call it."""
        self._requested = self._requested or reason

    def accept_signals(self, signals: Sequence[str]) -> None:
        """Record which signals ask this process to stop, and handle those received before it joined."""
        self.signals = tuple(signals)
        for name in early:
            self.ask(name)

    @property
    def was_asked(self) -> bool:
        """Whether this rank has been asked before."""
        return self._requested is not None

    @property
    def is_asked(self) -> bool:
        """Whether all ranks know that the job was asked to stop."""
        return self._agreement.reason is not None

    @property
    def will_notice(self) -> bool:
        """Whether the script has so far been seen to pass boundaries."""
        return self._is_asked_by_hand or self._is_passive or bool(self._saves)

    # -- what the rooms above set ------------------------------------------------------------------

    def save_with(self, name: str, source: StepSource, run: Callable[[], object], *, is_restored: bool) -> None:
        """Save with ``run`` if the job stops before a step of ``source``.

        Args:
            name: of the saved state; a later call with the same name replaces this one.
            source: what the loop iterates.
            run: saves. Called by: every rank.
            is_restored: whether the job has looked there for a state to resume from. One that has not only counts
                if it is the first of its source.
        """
        before = self._saves.get(name)
        is_restored = is_restored or (before is not None and before.is_restored)
        others = {other: save for other, save in self._saves.items() if other != name and save.source is source}
        if others and not is_restored:
            return
        for other, save in others.items():
            if not save.is_restored:
                del self._saves[other]
        self._saves[name] = _Save(source, run, is_restored)

    def forget(self, name: str) -> None:
        """Undo :meth:`save_with`."""
        self._saves.pop(name, None)

    def unless(self, is_mid_step: WeakMethod[Callable[[], bool]]) -> None:
        """Count no boundary while ``is_mid_step`` returns true, which it must on every rank or on none."""
        self._mid_step.append(is_mid_step)

    def be_passive(self) -> None:
        """Declare that this rank takes no steps: it passes no boundary, and the others do not wait for its count.

        Once :attr:`is_asked`, it exits when the ranks that take steps have left.
        """
        self._is_passive = True

    def stop_alone(self) -> None:
        """Have this rank stop at its own next boundary: if each rank steps at its own pace, no boundary is shared."""
        self._stops_alone = True

    def close(self) -> None:
        """Drop the registered saves and the store. Called when the world is left."""
        self._saves.clear()
        self._mid_step.clear()
        self._agreement.close()

    # -- the main thread ---------------------------------------------------------------------------

    def before_step(self, source: StepSource) -> None:
        """Stop here if this is the agreed boundary and there is a save for ``source``.

        Called by: every rank, before each step and at the end of each epoch.

        Raises:
            SystemExit: with ``STOPPED_EXIT_CODE``, after saving.
            PeerMissing: other ranks did not post their counts.
        """
        saves = [save.run for save in self._saves.values() if save.source is source]
        if len(saves) < len(self._saves):
            # Each of several sources has its own state: saving one would leave the others behind.
            if self._requested is not None and not self._has_warned:
                self._has_warned = True
                warn_nothing_to_save()
            return
        if saves and self._pass():
            for run in saves:
                run()
            self.stop()

    def is_here(self) -> bool:
        """Pass a boundary; return whether it is the one to stop at.

        Called by: every rank, between steps. Costs one lock until a stop is requested.

        Raises:
            PeerMissing: other ranks did not post their counts.
        """
        self._is_asked_by_hand = True
        return self._pass()

    def _pass(self) -> bool:
        # A loader read ahead by a thread of the script is not at a boundary.
        if threading.get_ident() != self._thread or self._is_mid_step():
            return False
        if self._requested is not None and self._agreement.reason is None:
            self._agreement.request(self._requested)
        return self._agreement.pass_boundary(alone=self._stops_alone)

    def stop(self) -> NoReturn:
        """Exit this rank as Python ordinarily does. Called by: every rank, once everything is saved."""
        log(f"stopped early because of {self._agreement.reason}, and saved; exit code {STOPPED_EXIT_CODE}")
        self.has_stopped = True
        raise SystemExit(STOPPED_EXIT_CODE)

    def _is_mid_step(self) -> bool:
        followed = [reference() for reference in self._mid_step]
        return any(is_mid_step() for is_mid_step in followed if is_mid_step is not None)

    # -- the failure detector's thread ------------------------------------------------------------------------

    def read(self, store: Store, event: Event, next_event: int) -> None:
        """Process an event of the log, if it is about stopping.

        ``store`` is the thread's own connection; the event log is full below ``next_event``.
        """
        match event:
            case Left():
                self._agreement.note_departure()
            case StopRequested():
                passed = self._agreement.begin(event.reason)
                if passed is None:
                    return
                if not self.will_notice:
                    warn_nothing_to_save()
                self._agreement.post_count(store, passed, next_event)
            case StopAt():
                self._agreement.settle(event.boundary)
            case _:
                pass

    def lose(self, store: Store, rank: int, next_event: int) -> None:
        """Record that the job continues without ``rank``. Else as :meth:`read`."""
        self._agreement.lose(store, rank, next_event)


def warn_nothing_to_save() -> None:
    """Warn that the job was asked to stop and cannot."""
    warn(
        "the job was asked to stop early, but nothing can be saved yet. Pass Checkpointer.restore() or save() the "
        "rankwise.DataLoader of the loop (exactly one), or call Checkpointer.stop_if_asked() between steps"
    )


# -- signals -------------------------------------------------------------------------------------------


def listen(preemption: Preemption, names: Sequence[str]) -> Callable[[], None]:
    """Have the signals of these names ask for a stop; return a function that restores the old handlers.

    A signal that is ignored remains ignored. A handler that the script installs later replaces this one. Does nothing
    off the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    preemption.accept_signals(names)
    listeners = [_Listener(preemption, signal.Signals[name]) for name in names]

    def restore() -> None:
        for listener in listeners:
            listener.restore()

    return restore


class _Listener:
    """One signal, from join to leave."""

    def __init__(self, preemption: Preemption, number: signal.Signals) -> None:
        self._preemption = preemption
        self._number = number
        self._num_received = 0
        self._before = signal.getsignal(number)
        # None: not installed by Python code, and cannot be called from here.
        self._is_ours = self._before not in {signal.SIG_IGN, None}
        if self._is_ours:
            signal.signal(number, self._handle)

    def restore(self) -> None:
        if self._is_ours and signal.getsignal(self._number) == self._handle:
            signal.signal(self._number, self._before)
        self._is_ours = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = not self._preemption.was_asked
        self._num_received += 1
        is_insistent = not self._preemption.will_notice or self._num_received >= INSISTENT
        if self._number is signal.SIGTERM and self._before is signal.SIG_DFL and is_insistent:
            # Waiting would be pointless: the process ends as it would without rankwise.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._preemption.ask(self._number.name)
        if is_first and not self._preemption.will_notice:
            # In a thread: the main one may be in the middle of printing.
            threading.Thread(target=warn_nothing_to_save, name="rankwise-stop").start()
        if callable(self._before):
            self._before(number, frame)
