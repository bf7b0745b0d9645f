# SPDX-License-Identifier: Apache-2.0
"""A thread per rank that follows the job's event log, so that nothing hangs in silence.

Ranks write events to the store: a failure, a departure, a status poll, a verdict on missing ranks. The thread
reads them in order and records their meaning; a rank that waits for a collective checks it
(``collective_timeout``). Never calls the waiting code, and never touches the process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from rankwise.errors import ConfigurationError, RankwiseError
from rankwise.health import diagnosis, process_probe
from rankwise.health.event_log import (
    ALL_DEPARTED_KEY,
    MOST_LOOKED_UP,
    MOST_REPORTED,
    NUM_DEPARTED_KEY,
    ConnectionBroke,
    DetectorEnded,
    Event,
    Expendable,
    Failed,
    Left,
    Loss,
    ProcessEnded,
    StatusPoll,
    TimedOut,
    departed_key,
    event_of,
    key_of,
    listed_key,
    post,
    post_departure,
)
from rankwise.health.flight_recorder import FlightRecorder, last_collective_path, open_last_collective, with_kind
from rankwise.health.fork_safety import hold_during_forks
from rankwise.health.preemption import Preemption
from rankwise.store.client import StoreLost

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch

    from rankwise.health.flight_recorder import Ticket
    from rankwise.store.client import Store
    from rankwise.world.facts import World

DETECTOR_END_SECONDS = 2.0
"""How long an exiting rank waits for its thread, and after a failure for the others."""
END_SLICE_SECONDS = 0.05
FIRST_LOOK_UP_SECONDS = 1.0
LONGEST_LOOK_UP_SECONDS = 60.0
"""Between two looks at which ranks have left without an event of the log, while a collective waits."""
EXPLANATION_SECONDS = 1.0
"""How long a rank with a broken connection waits for the reason before it polls."""
NO_LIMIT_SECONDS = 10.0**8
_DEVICE = -1
"""Stands for the device among the threads that wait."""


class CollectiveQueue(Protocol):
    """The collectives that a rank has queued on its device."""

    def add(self, ticket: Ticket, work: Any, /) -> None:
        """Follow a collective that has been queued."""
        ...


class FailureDetector:
    """Follows the event log for one rank, from join to leave.

    Its many fields belong together: what the two threads share (the log's meaning so far, under ``changed``) and what
    answers a status poll are read at once to decide whether a collective can complete.
    """

    def __init__(self, store: Store, world: World, timeout_seconds: float, stack_file: str = "") -> None:
        self.timeout_seconds = timeout_seconds
        self.hostname = world.hostname
        self.world_size = world.world_size
        self.recorder = FlightRecorder(open_last_collective(last_collective_path(stack_file)))
        self.check: Callable[[str], None] | None = None
        """Compares the description of a collective on all ranks before it begins, if enabled."""
        self.queue: CollectiveQueue | None = None
        """Follows what this rank queues on its device, if the CPU does not wait for collectives there."""
        self.error: RankwiseError | None = None
        self.preemption = Preemption(
            rank=world.rank,
            world_size=world.world_size,
            store=store,
            timeout_seconds=timeout_seconds,
            error=lambda: self.error,
        )
        self.world = world
        self.store = store.clone()
        """The connection of the thread that trains."""
        self.departures: dict[int, Loss | Left] = {}
        """The last event of each rank that has left or failed."""
        self.changed = threading.Condition()
        """Held while reading what the thread records; notified of each event."""
        hold_during_forks(self.changed)
        self._awaited: dict[int, Ticket] = {}
        """The collective that each thread waits for."""
        self._queued: Ticket | None = None
        """The oldest collective on this rank's device that has not completed."""
        self.next_event = 1
        """A number below which the log is full."""
        self._is_over = False
        """Whether the thread must end."""
        self._optional: set[int] = set()
        self._num_left = 0
        """How many departures the log has reported."""
        self._listed: tuple[int, list[int]] = (MOST_REPORTED, [])
        """How many departures were looked up in the list, and the numbers of those that were not there yet."""
        self._look_up_at = 0.0
        self._look_up_seconds = FIRST_LOOK_UP_SECONDS
        self._training = _TrainingThread()
        process_probe.introduce(self.store, world.rank, process_probe.this_process(stack_file))
        self._followed = store.clone()
        self._thread = threading.Thread(
            target=self._follow, args=(self._followed,), name="rankwise-failure-detector", daemon=True
        )
        self._thread.start()

    def ticket(
        self, what: str, exchange_id: int = 0, tensor: torch.Tensor | None = None, *, sent_bytes: int = 0
    ) -> Ticket:
        """Record that one more collective begins, and return its ticket.

        Args:
            what: its description; the same on every rank.
            exchange_id: see :class:`rankwise.health.flight_recorder.Ticket`.
            tensor: what this rank sends, for ranks to compare if ``what`` does not include its shape and dtype.
            sent_bytes: how much it sends, if no tensor is given.
        """
        if self.error is not None:
            # Hooks run in a thread of torch's on GPUs: backward() then raises it in the thread that trains.
            self._training.note_raised()
            raise self.error
        if self._awaited and exchange_id == 0:
            self._refuse_two_threads(what)
        # Collectives of some ranks cannot be compared on all.
        if self.check is not None and all(self.recorder.is_member(r, exchange_id) for r in range(self.world_size)):
            self.check(what if tensor is None else with_kind(what, tensor))
        return self.recorder.begin(what, exchange_id, sent_bytes if tensor is None else tensor.nbytes)

    def _refuse_two_threads(self, what: str) -> None:
        """Raise if another thread waits for a collective of all ranks: each rank would order the two in its own way."""
        others = [own for thread, own in self._awaited.copy().items() if thread != threading.get_ident()]
        if any(own.exchange_id == 0 and own.sequence for own in others):
            raise ConfigurationError(
                "Two threads of this rank call collectives of all ranks at once.",
                where=str(self.world),
                evidence=f"{what}, while another thread waits in {others[0].words}",
                do="give each thread a group of its own: group = rankwise.new_group(range(world.world_size)), "
                "and group=group in its calls",
            )

    def check_by(self, check: Callable[[str], None]) -> None:
        """Have ``check`` compare the description of each collective on all ranks before it begins."""
        self.check = check

    def follow_device_by(self, queue: CollectiveQueue) -> None:
        """Have ``queue`` follow the collectives that this rank queues on its device."""
        self.queue = queue

    def refuse_all(self, error: RankwiseError) -> None:
        """Have every collective of this rank raise ``error`` from now on."""
        self.error = error

    def reason_of(self, error: BaseException) -> RankwiseError | None:
        """Return the error of another rank's failure, if ``error`` is only a connection that broke because of it.

        ``error`` is what this rank is about to exit with: perhaps of a collective that torch waited for itself.
        """
        if isinstance(error, RankwiseError) or not diagnosis.is_of_a_connection(error):
            return None
        with self.changed:
            self.changed.wait_for(lambda: self.error is not None, EXPLANATION_SECONDS)
            return self.error or next(map(self.loss_of, self.lost_ranks()), None)

    def departed(self, rank: int) -> bool:
        """Return whether ``rank`` has left, or has failed and is optional."""
        if rank not in self.departures and self._may_be_unreported:
            self._look_up([rank])
        return rank in self.departures

    @property
    def _may_be_unreported(self) -> bool:
        """Whether ranks may have left without an event of the log."""
        return self._num_left >= MOST_REPORTED

    def _look_up(self, ranks: Sequence[int]) -> None:
        """Read departures from the store."""
        found = self.store.peek_all([departed_key(rank) for rank in ranks if rank not in self.departures])
        self._note_departures(list(found.values()))

    def _look_up_list(self, members: Sequence[int]) -> None:
        """Read the departures that were listed since the last time: one small message if there are none."""
        count, awaited = self._listed
        now_count = int(self.store.peek_all([NUM_DEPARTED_KEY]).get(NUM_DEPARTED_KEY, 0))
        numbers = {listed_key(number): number for number in [*awaited, *range(count + 1, now_count + 1)]}
        found = self.store.peek_all(list(numbers)) if numbers else {}
        self._note_departures(list(found.values()))
        missing = [number for key, number in numbers.items() if key not in found]
        if not set(awaited).isdisjoint(missing):
            # A rank was killed after it was counted, before it was listed.
            self._look_up(members)
            missing = [number for number in missing if number not in awaited]
        self._listed = max(count, now_count), missing

    def _note_departures(self, texts: Sequence[bytes]) -> None:
        with self.changed:
            for text in texts:
                event = event_of(text)
                if isinstance(event, Left | Failed):
                    self.departures.setdefault(event.rank, event)
                if isinstance(event, Failed) and event.rank != self.world.rank:
                    self._record_loss(self.store, event, [event.rank])
            if texts:
                self._look_up_seconds = FIRST_LOOK_UP_SECONDS

    def _look_up_members(self, exchange_id: int) -> None:
        """Read the departures of the ranks that take part in a collective, now and then."""
        now = time.monotonic()
        if self._may_be_unreported and now >= self._look_up_at:
            self._look_up_at = now + self._look_up_seconds
            self._look_up_seconds = min(2 * self._look_up_seconds, LONGEST_LOOK_UP_SECONDS)
            members = [rank for rank in range(self.world_size) if self.recorder.is_member(rank, exchange_id)]
            if len(members) <= MOST_LOOKED_UP:
                self._look_up(members)
            else:
                self._look_up_list(members)

    @property
    def has_lost_ranks(self) -> bool:
        """Whether the job continues without ranks that have failed: a collective may still be waiting for them."""
        return bool(self.lost_ranks())

    def note_wait(self, ticket: Ticket | None) -> None:
        """Record which collective this thread waits for now, if any: other ranks may ask."""
        if ticket is None:
            self._awaited.pop(threading.get_ident(), None)
        else:
            self._awaited[threading.get_ident()] = ticket
            self._look_up_seconds = FIRST_LOOK_UP_SECONDS
            self._look_up_at = min(self._look_up_at, time.monotonic() + FIRST_LOOK_UP_SECONDS)

    def note_queued(self, ticket: Ticket | None) -> None:
        """Record the oldest collective on the device that has not completed, if any: other ranks may ask."""
        self._queued = ticket

    def note_raised(self) -> None:
        """Record that this thread raises an error of a collective, or that the world is being left."""
        if self.is_in_main_thread():
            self._training.note_raised()

    def raise_unraised(self) -> None:
        """Raise the reason why ranks cannot continue, unless the training thread has raised it before."""
        if self.error is not None and not self._training.has_raised:
            raise self.error

    def fail_queued(self, error: RankwiseError, *, are_pending: bool) -> None:
        """Have every collective raise ``error``, unless there is another reason already.

        With ``are_pending``, results will never arrive: the training thread raises it as soon as it runs Python code,
        unless it has raised one.
        """
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()
        if are_pending and not self._training.has_raised:
            self._training.interrupt(self.error)

    def is_in_main_thread(self) -> bool:
        """Return whether this is the thread that joined, which trains."""
        return threading.get_ident() == self._training.id

    def leave(self, *, wait_for_peers: bool) -> None:
        """Report that this rank is done, and stop the thread.

        Args:
            wait_for_peers: return when every other rank has left or failed too, as the rank that serves the store does.
        """
        # From here on the store may exit before this rank's thread has read its own departure: that is not a failure.
        self.departures.setdefault(self.world.rank, Left(self.world.rank))
        with contextlib.suppress(StoreLost):
            process_probe.withdraw(self.store, self.world.rank)
            left = Left(self.world.rank, last=self.recorder.last, begun=self.recorder.begun())
            post_departure(self.store, left, self.world_size, self.next_event)
            self._end((self.timeout_seconds if self.error is None else DETECTOR_END_SECONDS) if wait_for_peers else 0.0)

    def fail(self, error_type: str, text: str, *, wait_for_peers: bool) -> None:
        """Report to every rank that this one failed, and stop the thread; else as :meth:`leave`."""
        with contextlib.suppress(StoreLost):
            process_probe.withdraw(self.store, self.world.rank)
            failed = Failed(self.world.rank, error_type, text, self.world.hostname)
            post_departure(
                self.store, failed, self.world_size, self.next_event, for_all=self.world.rank in self._optional
            )
            self._end(DETECTOR_END_SECONDS if wait_for_peers else 0.0)

    def _end(self, limit_seconds: float) -> None:
        """Wait for the others to leave, then have the thread end."""
        deadline = time.monotonic() + limit_seconds
        if limit_seconds and self.world_size > MOST_REPORTED and not self._optional:
            with contextlib.suppress(TimeoutError):
                self.store.wait([ALL_DEPARTED_KEY], limit_seconds)
            deadline = 0.0
        silent_ranks: set[int] = set()
        while (left := deadline - time.monotonic()) > 0 and (others := self._remaining() - silent_ranks):
            are_optional = others <= self._optional
            with self.changed:
                has_changed = self.changed.wait_for(
                    lambda now=others: self._remaining() - silent_ranks != now,
                    min(left, DETECTOR_END_SECONDS) if are_optional or self._may_be_unreported else left,
                )
            if self._may_be_unreported:
                self._look_up(sorted(others))
            if are_optional and not has_changed:
                # The exit of an optional rank may not have been reported.
                silent_ranks.update(diagnosis.unanswered(self.poll_status(without=silent_ranks), others))
        # A thread inside torch during interpreter shutdown would abort the process.
        ends_at = time.monotonic() + DETECTOR_END_SECONDS
        self._is_over = True
        while self._followed.end_waits():
            self._thread.join(END_SLICE_SECONDS)
            if not self._thread.is_alive() or time.monotonic() > ends_at:
                self._followed.close()
                return
        post(self.store, DetectorEnded(self.world.rank), self.next_event)
        self._thread.join(DETECTOR_END_SECONDS)

    def _remaining(self) -> set[int]:
        return set(range(self.world_size)) - self.departures.keys() - {self.world.rank}

    # -- the thread --------------------------------------------------------------------------------

    def _follow(self, store: Store) -> None:
        try:
            while not self._is_over:
                event = event_of(store.get(key_of(self.next_event), timeout_seconds=NO_LIMIT_SECONDS))
                self.next_event += 1
                with self.changed:
                    ended = self._read(store, event)
                    self.changed.notify_all()
                if ended:
                    return
        except (StoreLost, TimeoutError):
            with self.changed:
                if self.error is None and not self._is_over and self.world.rank not in self.departures:
                    self.error = diagnosis.store_lost(self.world)
                self.changed.notify_all()

    def _read(self, store: Store, event: Event) -> bool:
        """Process one event; return whether it is this rank's own departure."""
        self.preemption.read(store, event, self.next_event)
        match event:
            case Failed(rank=rank):
                self._num_left += 1
                self.departures.setdefault(rank, event)
                if rank != self.world.rank:
                    self._record_loss(store, event, [rank])
            case Left(rank=rank):
                self._num_left += 1
                self.departures.setdefault(rank, event)
            case Expendable():
                self._optional.update(event.ranks)
            case StatusPoll():
                situation = self.recorder.situation(self._waits(), self._training.id, event)
                process_probe.answer_poll(store, event, self.world.rank, {"host": self.hostname, **situation})
            case TimedOut():
                self._record_loss(store, event, [])
            case ConnectionBroke():
                self._record_loss(store, event, [] if event.have_left else event.gone)
            case ProcessEnded():
                self._record_loss(store, event, [event.rank])
            case DetectorEnded():
                return event.rank == self.world.rank
            case _:  # about stopping
                pass
        return False

    def _waits(self) -> dict[int, Ticket]:
        """Return the collective that each thread waits for, and the one that the device does."""
        waits = self._awaited.copy()
        if self._queued is not None:
            waits.setdefault(_DEVICE, self._queued)
        return waits

    def _record_loss(self, store: Store, event: Loss, ranks: Sequence[int]) -> None:
        """Record that ranks are lost: every rank's error, unless they are optional and another optional one remains."""
        others = self._optional.difference(self.lost_ranks(), ranks)
        if ranks and others and self._optional.issuperset(ranks):
            for rank in set(ranks) - {self.world.rank}:
                self.departures.setdefault(rank, event)
                self.preemption.lose(store, rank, self.next_event)
        elif self.error is None:
            self.error = diagnosis.of_event(self.world, event)

    def lost_ranks(self) -> list[int]:
        """Return the failed ranks that the job continues without."""
        return list(self._losses())

    def loss_of(self, rank: int) -> RankwiseError | None:
        """Return the error of the failure of ``rank``, if the job continues without it."""
        loss = self._losses().get(rank)
        return None if loss is None else diagnosis.of_event(self.world, loss)

    def _losses(self) -> dict[int, Loss]:
        departed = list(self.departures.items())
        return {rank: event for rank, event in departed if rank in self._optional and not isinstance(event, Left)}

    # -- which ranks are missing ---------------------------------------------------------------------

    def failure_blocking(self, ticket: Ticket) -> RankwiseError | None:
        """Return the error for why a collective cannot complete, as far as known."""
        if self.error is not None:
            return self.error
        self._look_up_members(ticket.exchange_id)
        for rank, event in list(self.departures.items()):
            if rank == self.world.rank or not self.recorder.is_member(rank, ticket.exchange_id):
                continue
            if isinstance(event, Left):
                begun = event.begun.get(self.recorder.name_of(ticket.exchange_id))
                if begun is not None and begun >= ticket.sequence:
                    continue  # it had begun this collective
                self.error = diagnosis.peer_left(self.world, ticket.words, ticket.number, event)
                return self.error
            # Without a number it is not known whether the collective needs that rank.
            if rank in self._optional and ticket.sequence:
                # Not raised for every collective: groups without that rank continue.
                return diagnosis.of_event(self.world, event)
        return None

    def poll_status(
        self, exchange_id: int = 0, sequence: int = 0, *, without: Collection[int] = (), stacks: str = "missing"
    ) -> diagnosis.Answers:
        """Ask every rank what it is doing, and probe those on this host that do not answer."""
        world = self.world
        answers = process_probe.poll_ranks(
            self.store,
            world.world_size,
            exchange=self.recorder.name_of(exchange_id),
            sequence=sequence,
            stacks=stacks,
            awaited=set(range(world.world_size)).difference(self.lost_ranks(), without),
            first=self.next_event,
        )
        silent_ranks = sorted(set(range(world.world_size)) - set(answers))
        seen = process_probe.probe_silent(self.store, silent_ranks)
        return {**answers, **{rank: {"host": self.hostname, **what} for rank, what in seen.items()}}


class _TrainingThread:
    """The thread that joined, which trains; and whether it has raised the reason why ranks cannot continue."""

    def __init__(self) -> None:
        self.id = threading.get_ident()
        self.has_raised = False
        self._is_interrupted = False

    def note_raised(self) -> None:
        """Record that it raises the reason itself: it need not be made to any more."""
        self.has_raised = True
        if self._is_interrupted:
            raise_in_thread(self.id, None)

    def interrupt(self, error: RankwiseError) -> None:
        """Make it raise ``error`` as soon as it runs Python code."""
        self._is_interrupted = True
        raise_in_thread(self.id, error)
        self.has_raised = True


def raise_in_thread(thread_id: int, error: BaseException | None) -> None:
    """Have a thread raise ``error`` as soon as it runs Python code again; ``None`` withdraws one not raised yet.

    Does nothing if the thread has ended.

    Source: PyThreadState_SetAsyncExc, which takes a class; so this one's only instance is ``error``.
    """
    if error is None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), None)
        # Until some thread raises such an error, Python 3.11 looks for one again and again in a profiled function.
        found = threading.Thread(target=_raise_and_catch)  # in this thread, a signal's handler may come between the two
        found.start()
        found.join()
        return
    kind = type(error)
    stand_in = type(kind.__name__, (kind,), {"__new__": lambda *_: error, "__module__": kind.__module__})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(stand_in))


class _Caught(BaseException):
    """Is raised and caught at once."""


def _raise_and_catch() -> None:
    with contextlib.suppress(_Caught):
        raise_in_thread(threading.get_ident(), _Caught())
        while True:
            pass
