# SPDX-License-Identifier: Apache-2.0
"""The operations that this rank has asked for and that have not been carried out, matched between ranks by name.

There is no thread in the background. Whenever a rank waits, the ranks report what each has pending, and what is
pending on every member is carried out, in an order that all derive alike: in rounds of the whole world, or, while there
are process sets of some of the ranks, by a log that all ranks read.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rankwise.comm.collectives import gather_json
from rankwise.comm.session import current_or_none
from rankwise.compat.horovod.errors import HorovodInternalError, Refused, not_initialized
from rankwise.compat.horovod.negotiation import world_round
from rankwise.compat.horovod.negotiation.executor import ReadyOperation, carry_out, stand_ins
from rankwise.compat.horovod.negotiation.matching import Decision, RankState
from rankwise.compat.horovod.negotiation.request import (
    ANNOUNCED,
    HAS_JOINED,
    LEAVES,
    POLLS,
    WAITS,
    Key,
    OperationRequest,
    PendingOperation,
    broken_off,
    called,
    waits_for,
)
from rankwise.compat.horovod.negotiation.set_decisions import EventOutcome, WaitEvent
from rankwise.compat.horovod.negotiation.set_log import SetLog
from rankwise.errors import PeerMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.comm.collectives import Group
    from rankwise.comm.session import Session


_numbers = itertools.count(1)
"""Of handles: one of a world that has been left must not be one of the next."""
_log_numbers = itertools.count(1)


@dataclass(kw_only=True)
class SetMembers:
    """Who a process set is."""

    ranks: tuple[int, ...]
    group: Group | None
    """``None`` for the world."""


@dataclass(kw_only=True)
class MachinePosition:
    """Where this rank sits among the machines."""

    cross_rank: int
    cross_size: int
    is_homogeneous: bool


@dataclass(kw_only=True)
class OperationQueue:
    """What ``hvd.init()`` opens: the pending operations of this rank, and what they are matched by."""

    session: Session
    has_opened_world: bool
    """Else the world is somebody else's to leave."""
    seat: MachinePosition
    members: dict[int, SetMembers]
    """Of each process set, by its number."""
    next_set_id: int = 1
    pending: dict[Key, PendingOperation] = field(default_factory=dict)
    handles: dict[int, PendingOperation] = field(default_factory=dict)
    num_unnamed: dict[tuple[str, int], int] = field(default_factory=dict)
    joined_ranks: set[int] = field(default_factory=set)
    has_joined: bool = False
    last_joined: int = -1
    as_joined: dict[str, Callable[[], None]] = field(default_factory=dict)
    """What a joined rank does when the others announce a step, by its name."""
    log: SetLog | None = None
    """How operations are matched, while there are process sets of some of the ranks."""

    def add_members(self, members: SetMembers) -> int:
        """Return the number of a new process set. Called by: every rank, in the same order."""
        number = self.next_set_id
        self.next_set_id += 1
        self.members[number] = members
        return number

    def name(self, prefix: str, name: str | None, set_id: int) -> str:
        """Return what an operation is matched by; without a name, how many of its kind came before it."""
        if name:
            return f"{prefix}.{name}"
        number = self.num_unnamed.get((prefix, set_id), 0) + 1
        self.num_unnamed[prefix, set_id] = number
        return f"{prefix}.noname.{number}"

    def submit(self, operation: PendingOperation) -> int:
        """Note an operation; return its handle.

        Raises:
            Refused: one of its name is pending.
        """
        self.hold(operation)
        handle = next(_numbers)
        self.handles[handle] = operation
        return handle

    def hold(self, operation: PendingOperation) -> None:
        """Note an operation that needs no handle. Raises as :meth:`submit` does."""
        key = operation.request.key
        if key in self.pending:
            raise Refused(
                f"{operation.request.name!r} is pending already.",
                evidence=f"pending: {self.pending[key].request}",
                do="give it another name, or synchronize the first one before this call",
            )
        self.pending[key] = operation

    def wait(self, operation: PendingOperation) -> None:
        """Go round until an operation is done.

        Called by: every rank, at any of the calls that wait.

        Raises:
            HorovodInternalError: ranks gave different things, or wait for each other.
            PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
        """
        try:
            while not operation.is_done:
                self.run_round(WAITS, operation)
        finally:
            # An error or an interrupt of the wait itself: nobody is left to take the result.
            if not operation.is_done:
                self.withdraw(operation)
        if operation.error is not None:
            raise operation.error

    def withdraw(self, operation: PendingOperation) -> None:
        """Forget an operation that nobody waits for any more."""
        key = operation.request.key
        if self.pending.get(key) is operation:
            del self.pending[key]
            if self.log is not None and key in self.log.sent:
                self.log.withdrawn[key] = operation

    def join(self) -> int:
        """Take part with zeros in what the others do until all have joined; return who joined last."""
        self.has_joined = True
        try:
            while self.has_joined:
                self.run_round(HAS_JOINED)
        finally:
            self.has_joined = False
        return self.last_joined

    def flush(self) -> None:
        """Carry out what is pending and what other ranks have asked for too. Called when the world is left."""
        detector = self.session.detector
        try:
            while (
                (self.pending or self.log is not None)
                and (detector is None or detector.error is None)
                and self.run_round(LEAVES)
            ):
                pass
        except PeerMissing:
            # A rank has left that never asked for it. Nobody waits for the result: that is no error.
            self.pending.clear()

    def run_round(self, mode: int, waited_for: PendingOperation | None = None) -> bool:
        """Tell all ranks what is pending here, and carry out what is pending everywhere.

        Called by: every rank, at any of the calls that wait.

        Returns:
            Whether another round may come to more.

        Raises:
            HorovodInternalError: all ranks wait, and for what another would have to ask for. Where an operation is
                waited for, it gets the error instead.
            PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
        """
        if self.has_joined:
            mode = HAS_JOINED
        detector = self.session.detector
        if detector is None:
            return self._run_round(mode, waited_for)
        with detector.recorder.called(called(mode, waited_for)):
            return self._run_round(mode, waited_for)

    def follow_sets(self) -> None:
        """Match operations by a log while there is a process set of several ranks and not all.

        Called by: every rank, when process sets have come or gone.
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
        own = RankState(requests=requests, mode=mode, waits=waits_for(mode, waited_for))
        outcome = world_round.meet(self.session.exchange, own, self._ranks_of_set())
        self._note_joined(outcome.modes)
        self._carry_out(outcome.decisions)
        if set(outcome.modes) == {HAS_JOINED}:
            self._end_join()
            return False
        if outcome.error is not None:
            self._end_wait(outcome.error, mode, waited_for)
        return bool(outcome.decisions) or POLLS in outcome.modes

    def _carry_out_alone(self) -> None:
        """Carry out what is of process sets of this rank alone: nobody else has to come to it."""
        is_alone = {number: number != 0 and len(members.ranks) == 1 for number, members in self.members.items()}
        requests = [operation.request for operation in self.pending.values() if is_alone[operation.request.set_id]]
        if requests:
            self._carry_out([Decision(request=request) for request in requests])

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

        def take(event: WaitEvent, outcome: EventOutcome) -> bool:
            if event.mode == HAS_JOINED and event.rank not in self.joined_ranks:
                self.last_joined = event.rank
            self.joined_ranks = log.joined()
            self._carry_out(outcome.decisions)
            if outcome.has_all_joined:
                self._end_join()
            if outcome.error is not None and own in outcome.stuck:
                self._end_wait(outcome.error, mode, waited_for)
            return self.log is not log or (waited_for is not None and waited_for.is_done)

        log.wait(event, take, called(mode, waited_for))
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

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        taken = [(decision, self._pop_pending(decision.request.key)) for decision in decisions]
        try:
            self._carry_out_popped(taken)
        except BaseException as error:
            for _, operation in taken:
                if operation is not None and not operation.is_done:
                    operation.end(broken_off(operation.request, error))
            raise

    def _pop_pending(self, key: Key) -> PendingOperation | None:
        """Return what this rank has pending under a name that has been decided on, and forget it."""
        if self.log is not None:
            if key in self.log.withdrawn:
                return self.log.withdrawn.pop(key)
            self.log.sent.discard(key)
        return self.pending.pop(key, None)

    def _carry_out_popped(self, taken: Sequence[tuple[Decision, PendingOperation | None]]) -> None:
        sent: list[tuple[PendingOperation | None, ReadyOperation]] = []
        steps: list[tuple[PendingOperation | None, str]] = []
        for decision, operation in taken:
            request = decision.request
            if decision.error is not None:
                if operation is not None:
                    operation.end(decision.error)
            elif self.session.world.rank not in self.members[request.set_id].ranks:
                continue
            elif request.kind == ANNOUNCED:
                steps.append((operation, request.name))
            else:
                sent.append((operation, self._work(request, operation)))
        for (operation, _), tensors in zip(sent, carry_out([work for _, work in sent]), strict=True):
            if operation is not None:
                operation.finish(tensors)
        # Last: a step may go round itself, and everything of this round has to be done by then.
        for operation, name in steps:
            self._step(name, operation)

    def _work(self, request: OperationRequest, operation: PendingOperation | None) -> ReadyOperation:
        members = self.members[request.set_id]
        if operation is None:
            device = torch.device(self.session.world.device if request.device != "cpu" else "cpu")
            tensors: Sequence[torch.Tensor] = stand_ins(request, device)
        else:
            tensors = operation.tensors
        return ReadyOperation(
            request=request,
            group=members.group,
            size=len(members.ranks),
            tensors=tensors,
            is_in_place=operation is not None and operation.is_in_place,
            splits=operation.splits if operation is not None else (),
        )

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
        """End the wait of this rank with an error, and leave everything else as it is."""
        if waited_for is not None:
            self._pop_pending(waited_for.request.key)
            waited_for.end(error)
        elif mode == HAS_JOINED:
            self.has_joined = False
            raise error


class _Process:
    """What ``hvd.init()`` has opened in this process."""

    queue: OperationQueue | None = None


_process = _Process()


def current_queue() -> OperationQueue:
    """Return what ``hvd.init()`` has opened.

    Raises:
        ConfigurationError: it has not been called, or the world has been left.
    """
    queue = current_queue_or_none()
    if queue is None:
        raise not_initialized()
    return queue


def current_queue_or_none() -> OperationQueue | None:
    """Return what ``hvd.init()`` has opened, or ``None``."""
    if _process.queue is not None and _process.queue.session is not current_or_none():
        _process.queue = None
    return _process.queue


def set_current_queue(queue: OperationQueue | None) -> None:
    """Replace the open queue. Called by ``hvd.init()`` and ``hvd.shutdown()`` only."""
    _process.queue = queue


def register(name: str, as_joined: Callable[[], None]) -> None:
    """Say what a rank that has called ``join()`` does when the others announce ``name``."""
    current_queue().as_joined[name] = as_joined


def announce(name: str, take_part: Callable[[], None], set_id: int = 0) -> None:
    """Do a step whose tensors travel elsewhere, once every rank is about to do it.

    Called by: every rank that has not joined, in any order towards other operations.

    Args:
        name: what ranks are matched by. Where it has been registered, joined ranks do their part of it.
        take_part: the step. It may wait for the same step of other ranks.
        set_id: the process set whose ranks do it.

    Raises:
        HorovodInternalError: all ranks wait, and for what another would have to ask for.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    queue = current_queue()
    request = OperationRequest(kind=ANNOUNCED, name=name, set_id=set_id, allows_joined=name in queue.as_joined)
    operation = PendingOperation(request=request, take_part=take_part)
    queue.hold(operation)
    queue.wait(operation)
