# SPDX-License-Identifier: Apache-2.0
"""The pending operations of this rank, matched between ranks by name.

There is no background thread. Whenever a rank waits, the ranks report their pending operations, and those that are
pending on every member are carried out, in the same order on all ranks: in rounds of the whole world, or, while there
are process sets of some of the ranks, by a log that all ranks read.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from rankwise.comm.collectives import gather_json, new_group
from rankwise.comm.session import current_or_none
from rankwise.compat.horovod.exceptions import HorovodInternalError, Refused, not_initialized
from rankwise.compat.horovod.executor import (
    carry_out,
    fits_a_note,
    input_of,
    reduced_from_notes,
    zeros_for,
)
from rankwise.compat.horovod.request import (
    ANNOUNCED,
    HAS_JOINED,
    LEAVES,
    POLLS,
    WAITS,
    Decision,
    Key,
    OperationRequest,
    PendingOperation,
    RankState,
    SetMembers,
    called,
    decide,
    digest_of,
    stalled,
    state_from_json,
    waits_for,
)
from rankwise.compat.horovod.set_log import EventOutcome, SetLog, WaitEvent
from rankwise.errors import PeerMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rankwise.comm.collectives import Group
    from rankwise.comm.session import Session


_numbers = itertools.count(1)
"""Of handles: those of a world that has been left must not be valid in the next."""
_log_numbers = itertools.count(1)
_REPORT = struct.Struct("<qq")
"""A digest of what a rank has pending, and why it waits."""
# Different texts: after an interrupt, ranks must not take one exchange for the other.
_AT_A_GLANCE = "rankwise.compat.horovod, at a glance: what each rank has pending"
_IN_FULL = "rankwise.compat.horovod: what each rank has pending"


class MachinePosition(NamedTuple):
    """The position of this rank among the machines."""

    cross_rank: int
    cross_size: int
    is_homogeneous: bool
    hostnames: tuple[str, ...]
    """Of all ranks, in their order."""


@dataclass(kw_only=True)
class OperationQueue:
    """What ``hvd.init()`` opens: the pending operations of this rank, and how they are matched.

    Its many fields last from ``hvd.init()`` to ``hvd.shutdown()``: operations, the process sets they belong to, and the
    ranks that have joined.
    """

    session: Session
    has_opened_world: bool
    """Otherwise ``hvd.shutdown()`` does not leave the world."""
    seat: MachinePosition
    members: dict[int, SetMembers]
    """Of each process set, by its number."""
    next_set_id: int = 1
    groups: dict[tuple[int, ...], Group] = field(default_factory=dict)
    """Of process sets, also of removed ones, by their ranks: a set that is added again opens no other."""
    pending: dict[Key, PendingOperation] = field(default_factory=dict)
    handles: dict[int, PendingOperation] = field(default_factory=dict)
    num_unnamed: dict[tuple[str, int], int] = field(default_factory=dict)
    joined_ranks: set[int] = field(default_factory=set)
    has_joined: bool = False
    last_joined: int = -1
    as_joined: dict[str, Callable[[], None]] = field(default_factory=dict)
    """The actions of a joined rank when the others announce a step, by the step's name."""
    log: SetLog | None = None
    """Matches operations while there are process sets of some of the ranks."""

    def add_members(self, ranks: tuple[int, ...]) -> int:
        """Return the number of a new process set. Called by: every rank, in the same order."""
        number = self.next_set_id
        self.next_set_id += 1
        if ranks not in self.groups:
            self.groups[ranks] = new_group(ranks)
        self.members[number] = SetMembers(ranks=ranks, group=self.groups[ranks])
        return number

    def name(self, prefix: str, name: str | None, set_id: int) -> str:
        """Return the name by which an operation is matched; unnamed ones are numbered by prefix and process set."""
        if name:
            return f"{prefix}.{name}"
        number = self.num_unnamed.get((prefix, set_id), 0) + 1
        self.num_unnamed[prefix, set_id] = number
        return f"{prefix}.noname.{number}"

    def submit(self, operation: PendingOperation) -> int:
        """Add an operation; return its handle."""
        self.hold(operation)
        handle = next(_numbers)
        self.handles[handle] = operation
        return handle

    def hold(self, operation: PendingOperation) -> None:
        """Add an operation that needs no handle; raise if one of its name is pending."""
        key = operation.request.key
        if key in self.pending:
            raise Refused(
                f"{operation.request.name!r} is pending already.",
                evidence=f"pending: {self.pending[key].request}",
                do="give it another name, or synchronize the first one before this call",
            )
        self.pending[key] = operation

    def wait(self, operation: PendingOperation) -> None:
        """Run rounds until an operation is done. Called by: every rank, at any of the calls that wait."""
        try:
            while not operation.is_done:
                self.run_round(WAITS, operation)
        finally:
            # An error or an interrupt of the wait itself: nothing will use the result.
            if not operation.is_done:
                self.withdraw(operation)
        if operation.error is not None:
            raise operation.error

    def withdraw(self, operation: PendingOperation) -> None:
        """Remove an operation that this rank no longer waits for."""
        key = operation.request.key
        if self.pending.get(key) is operation:
            del self.pending[key]
            if self.log is not None and key in self.log.sent:
                self.log.withdrawn[key] = operation

    def join(self) -> int:
        """Take part with zeros in the others' operations until all have joined; return the rank that joined last."""
        self.has_joined = True
        try:
            while self.has_joined:
                self.run_round(HAS_JOINED)
        finally:
            self.has_joined = False
        return self.last_joined

    def flush(self) -> None:
        """Carry out pending operations that all their ranks have called. Called when the world is left."""
        detector = self.session.detector
        try:
            while (
                (self.pending or self.log is not None)
                and (detector is None or detector.error is None)
                and self.run_round(LEAVES)
            ):
                pass
        except PeerMissing:
            # A rank has left that never called it. This is not an error: nothing waits for the result.
            self.pending.clear()

    def run_round(self, mode: int, waited_for: PendingOperation | None = None) -> bool:
        """Report to all ranks what is pending here, and carry out what is pending on all members.

        Called by: every rank, at any of the calls that wait. Returns whether another round may do more. If every rank
        waits for an operation that another one has not called, the operation that this rank waits for gets the error.
        """
        if self.has_joined:
            mode = HAS_JOINED
        detector = self.session.detector
        if detector is None:
            return self._run_round(mode, waited_for)
        with detector.recorder.called(called(mode, waited_for)):
            return self._run_round(mode, waited_for)

    def follow_sets(self) -> None:
        """Match operations by a log while there is a process set of several ranks but not all.

        Called by: every rank, when process sets have been added or removed.
        """
        world_size = self.session.world.world_size
        is_needed = any(1 < len(members.ranks) < world_size for members in self.members.values())
        if not is_needed:
            self.log = None
        elif self.log is None:
            number = max(gather_json(next(_log_numbers), what="rankwise.compat.horovod: the log of process sets"))
            store, detector = self.session.store, self.session.detector
            if store is not None and detector is not None:
                self.log = SetLog(self.session.world, store, detector, number, self._ranks_of_set)

    def _run_round(self, mode: int, waited_for: PendingOperation | None) -> bool:
        self._carry_out_alone()
        if waited_for is not None and waited_for.is_done:
            return True
        if self.log is not None:
            return self._follow_log(self.log, mode, waited_for)
        requests = tuple(operation.request for operation in self.pending.values())
        modes, is_same, notes = self._glance(requests, mode)
        self._note_joined(modes)
        error = None
        if is_same and notes:
            operation = self.pending.pop(requests[0].key)
            operation.finish([reduced_from_notes(operation, notes)])
            return True
        if is_same:
            decisions = [Decision(request) for request in requests]
        else:
            own = RankState(requests, mode, waits_for(mode, waited_for))
            states = [state_from_json(one) for one in gather_json(own, what=_IN_FULL)]
            decisions = decide(states, self._ranks_of_set())
            if not decisions and POLLS not in modes:
                error = stalled(dict(enumerate(states)), self._ranks_of_set(), range(len(states)))
        self._carry_out(decisions)
        if set(modes) == {HAS_JOINED}:
            self._end_join()
            return False
        if error is not None:
            self._end_wait(error, mode, waited_for)
        return bool(decisions) or POLLS in modes

    def _glance(self, requests: tuple[OperationRequest, ...], mode: int) -> tuple[list[int], bool, list[bytes]]:
        """Return every rank's mode, whether all have the same requests in the same order, and their notes.

        Called by: every rank of the world. One small all-gather is enough where all ranks call the same operations; it
        also carries the input of a small reduction. Without one, there are no notes.
        """
        exchange = self.session.exchange
        if exchange is None:
            return [mode], bool(requests) or mode != WAITS, []
        fits = fits_a_note(requests)
        note = _REPORT.pack(digest_of(requests), mode)
        if fits:
            note += input_of(self.pending[requests[0].key])
        notes = exchange.gather_notes(note, _AT_A_GLANCE)
        reports = [_REPORT.unpack_from(note) for note in notes]
        modes: list[int] = [mode for _, mode in reports]
        # If no rank has anything pending and their modes differ, decide() must find out whether any can continue.
        has_reason = bool(requests) or POLLS in modes or len(set(modes)) == 1
        return modes, has_reason and len({digest for digest, _ in reports}) == 1, notes if fits else []

    def _carry_out_alone(self) -> None:
        """Carry out the operations of process sets that only this rank is in: they need no other rank."""
        if len(self.members) == 1:
            return
        is_alone = {number: number != 0 and len(members.ranks) == 1 for number, members in self.members.items()}
        requests = [operation.request for operation in self.pending.values() if is_alone[operation.request.set_id]]
        if requests:
            self._carry_out(map(Decision, requests))

    def _follow_log(self, log: SetLog, mode: int, waited_for: PendingOperation | None) -> bool:
        """Wait by the log of process sets until this wait is over; see :meth:`run_round`."""
        own = self.session.world.rank
        requests = [
            operation.request for key, operation in self.pending.items() if key not in log.sent or key in log.withdrawn
        ]
        event = WaitEvent(
            rank=own,
            mode=mode,
            awaited=None if waited_for is None else waited_for.request.key,
            waits_text=waits_for(mode, waited_for),
            requests=tuple(requests),
            dropped=tuple(log.withdrawn),
        )
        log.sent.update(request.key for request in requests)

        def apply(event: WaitEvent, outcome: EventOutcome) -> bool:
            if event.mode == HAS_JOINED and event.rank not in self.joined_ranks:
                self.last_joined = event.rank
            self.joined_ranks = log.joined()
            self._carry_out(outcome.decisions)
            if outcome.has_all_joined:
                self._end_join()
            if outcome.error is not None and own in outcome.stuck:
                self._end_wait(outcome.error, mode, waited_for)
            return self.log is not log or (waited_for is not None and waited_for.is_done)

        log.wait(event, apply, called(mode, waited_for))
        return mode != LEAVES

    def _end_join(self) -> None:
        self.has_joined = False
        self.joined_ranks.clear()

    def _note_joined(self, modes: Sequence[int]) -> None:
        if not self.joined_ranks and HAS_JOINED not in modes:
            return
        joined = {rank for rank, mode in enumerate(modes) if mode == HAS_JOINED}
        if joined - self.joined_ranks:
            self.last_joined = max(joined - self.joined_ranks)
        self.joined_ranks = joined

    def _ranks_of_set(self) -> dict[int, tuple[int, ...]]:
        return {number: members.ranks for number, members in self.members.items()}

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        taken = [(decision, self._pop_pending(decision.request.key)) for decision in decisions]
        try:
            self._carry_out_popped(taken)
        except BaseException as error:
            evidence = f"{type(error).__name__}: {error}"
            for (request, _), operation in taken:
                if operation is not None and not operation.is_done:
                    what = f"{request.name!r} was aborted."
                    operation.end(HorovodInternalError(what, evidence=evidence, do="fix that error first"))
            raise

    def _pop_pending(self, key: Key) -> PendingOperation | None:
        """Remove and return this rank's operation under a name that has been decided on."""
        if self.log is not None:
            if key in self.log.withdrawn:
                return self.log.withdrawn.pop(key)
            self.log.sent.discard(key)
        return self.pending.pop(key, None)

    def _carry_out_popped(self, taken: Sequence[tuple[Decision, PendingOperation | None]]) -> None:
        sent: list[PendingOperation] = []
        steps: list[tuple[PendingOperation | None, str]] = []
        for (request, error), operation in taken:
            if error is not None:
                if operation is not None:
                    operation.end(error)
            elif self.session.world.rank not in self.members[request.set_id].ranks:
                continue
            elif request.kind == ANNOUNCED:
                steps.append((operation, request.name))
            else:
                sent.append(operation or self._as_joined(request))
        for operation, tensors in zip(sent, carry_out(sent), strict=True):
            operation.finish(tensors)
        # Last: a step may run rounds itself, and all operations of this round must be done by then.
        for operation, name in steps:
            self._step(name, operation)

    def _as_joined(self, request: OperationRequest) -> PendingOperation:
        device = torch.device(self.session.world.device if request.device != "cpu" else "cpu")
        tensors = zeros_for(request, device)
        return PendingOperation(request=request, members=self.members[request.set_id], tensors=tensors)

    def _step(self, name: str, operation: PendingOperation | None) -> None:
        if operation is None:
            if name not in self.as_joined:
                raise HorovodInternalError(
                    f"This rank has called join() and has no {name!r}, which the other ranks use.",
                    do="create the same optimizers on every rank before hvd.join()",
                )
            self.as_joined[name]()
            return
        if operation.take_part is not None:
            operation.take_part()
        operation.end()

    def _end_wait(self, error: HorovodInternalError, mode: int, waited_for: PendingOperation | None) -> None:
        """End the wait of this rank with an error; other operations remain pending."""
        if waited_for is not None:
            self._pop_pending(waited_for.request.key)
            waited_for.end(error)
        elif mode == HAS_JOINED:
            self.has_joined = False
            raise error


class _OpenQueue:
    """The queue that ``hvd.init()`` has opened in this process."""

    queue: OperationQueue | None = None


_open = _OpenQueue()


def current_queue() -> OperationQueue:
    """Return the queue that ``hvd.init()`` has opened; raise if there is none, or the world has been left."""
    queue = current_queue_or_none()
    if queue is None:
        raise not_initialized()
    return queue


def current_queue_or_none() -> OperationQueue | None:
    """Return the queue that ``hvd.init()`` has opened, or ``None``."""
    if _open.queue is not None and _open.queue.session is not current_or_none():
        _open.queue = None
    return _open.queue


def set_current_queue(queue: OperationQueue | None) -> None:
    """Replace the open queue. Called by ``hvd.init()`` and ``hvd.shutdown()`` only."""
    _open.queue = queue


def register(name: str, as_joined: Callable[[], None]) -> None:
    """Register the action of a rank that has called ``join()`` when the others announce ``name``."""
    current_queue().as_joined[name] = as_joined


def announce(name: str, take_part: Callable[[], None], set_id: int = 0) -> None:
    """Run a step that does its own communication, once every rank has announced it.

    Called by: every rank of the process set that has not joined; other operations may come in any order. Joined ranks
    take part if ``name`` has been registered. The step may wait for the same step of other ranks.
    """
    queue = current_queue()
    request = OperationRequest(kind=ANNOUNCED, name=name, set_id=set_id, allows_joined=name in queue.as_joined)
    operation = PendingOperation(request=request, members=queue.members[set_id], take_part=take_part)
    queue.hold(operation)
    queue.wait(operation)
