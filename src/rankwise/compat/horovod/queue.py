# SPDX-License-Identifier: Apache-2.0
"""The operations that this rank has asked for and that have not been carried out, matched between ranks by name.

There is no thread in the background. Whenever a rank waits it goes round: all ranks say what each has pending, and
what is pending on every member is carried out, in an order that all derive alike.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rankwise.collectives import gather_json
from rankwise.compat.horovod.errors import HorovodInternalError, Refused, not_initialized
from rankwise.compat.horovod.execution import Work, carry_out, stand_ins
from rankwise.compat.horovod.pending import Pending
from rankwise.compat.horovod.request import (
    ANNOUNCED,
    HAS_JOINED,
    LEAVES,
    POLLS,
    WAITS,
    Decision,
    Key,
    RankState,
    Request,
    decide,
    digest_of,
    from_json,
    stalled,
    to_json,
)
from rankwise.errors import PeerMissing
from rankwise.session import current_or_none

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.collectives import Group
    from rankwise.session import Session

# Different words: after an interrupt, ranks must not take one for the other.
_AT_A_GLANCE = "rankwise.compat.horovod, at a glance: what each rank has pending"
_WHAT = "rankwise.compat.horovod: what each rank has pending"
_numbers = itertools.count(1)
"""Of handles: one of a world that has been left must not be one of the next."""


@dataclass(kw_only=True)
class Members:
    """Who a process set is."""

    ranks: tuple[int, ...]
    group: Group | None
    """``None`` for the world."""


@dataclass(kw_only=True)
class Seat:
    """Where this rank sits among the machines."""

    cross_rank: int
    cross_size: int
    is_homogeneous: bool


@dataclass(kw_only=True)
class Queue:
    """What ``hvd.init()`` opens: the pending operations of this rank, and what they are matched by."""

    session: Session
    has_opened_world: bool
    """Else the world is somebody else's to leave."""
    seat: Seat
    members: dict[int, Members]
    """Of each process set, by its number."""
    next_set_id: int = 1
    pending: dict[Key, Pending] = field(default_factory=dict)
    handles: dict[int, Pending] = field(default_factory=dict)
    num_unnamed: dict[tuple[str, int], int] = field(default_factory=dict)
    joined_ranks: set[int] = field(default_factory=set)
    has_joined: bool = False
    last_joined: int = -1
    as_joined: dict[str, Callable[[], None]] = field(default_factory=dict)
    """What a joined rank does when the others announce a step, by its name."""

    def name(self, prefix: str, name: str | None, set_id: int) -> str:
        """Return what an operation is matched by; without a name, how many of its kind came before it."""
        if name:
            return f"{prefix}.{name}"
        number = self.num_unnamed.get((prefix, set_id), 0) + 1
        self.num_unnamed[prefix, set_id] = number
        return f"{prefix}.noname.{number}"

    def submit(self, operation: Pending) -> int:
        """Note an operation; return its handle.

        Raises:
            Refused: one of its name is pending.
        """
        self.hold(operation)
        handle = next(_numbers)
        self.handles[handle] = operation
        return handle

    def hold(self, operation: Pending) -> None:
        """Note an operation that needs no handle. Raises as :meth:`submit` does."""
        key = operation.request.key
        if key in self.pending:
            raise Refused(
                f"{operation.request.name!r} is pending already.",
                evidence=f"pending: {self.pending[key].request}",
                do="give it another name, or synchronize the first one before",
            )
        self.pending[key] = operation

    def wait(self, operation: Pending) -> None:
        """Go round until an operation is done.

        Called by: every rank, at any of the calls that wait.

        Raises:
            HorovodInternalError: ranks gave different things, or wait for each other.
            PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
        """
        try:
            while not operation.is_done:
                self.go_round(WAITS, operation)
        finally:
            # An error or an interrupt of the wait itself: nobody is left to take the result.
            if not operation.is_done:
                self.pending.pop(operation.request.key, None)
        if operation.error is not None:
            raise operation.error

    def join(self) -> int:
        """Take part with zeros in what the others do until all have joined; return who joined last."""
        self.has_joined = True
        try:
            while self.has_joined:
                self.go_round(HAS_JOINED)
        finally:
            self.has_joined = False
        return self.last_joined

    def flush(self) -> None:
        """Carry out what is pending and what other ranks have asked for too. Called when the world is left."""
        watch = self.session.watch
        try:
            while self.pending and (watch is None or watch.error is None) and self.go_round(LEAVES):
                pass
        except PeerMissing:
            # A rank has left that never asked for it. Nobody waits for the result: that is no error.
            self.pending.clear()

    def go_round(self, mode: int, waited_for: Pending | None = None) -> bool:
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
        watch = self.session.watch
        if watch is None:
            return self._go_round(mode, waited_for)
        outer, watch.record.purpose = watch.record.purpose, _called(mode, waited_for)
        try:
            return self._go_round(mode, waited_for)
        finally:
            watch.record.purpose = outer

    def _go_round(self, mode: int, waited_for: Pending | None) -> bool:
        requests = tuple(operation.request for operation in self.pending.values())
        modes, is_same = self._glance(requests, mode)
        self._note_joined(modes)
        decisions = [Decision(request=request) for request in requests]
        states: list[RankState] = []
        if not is_same:
            state = RankState(requests=requests, mode=mode, waits=_words(mode, waited_for))
            states = [from_json(one) for one in gather_json(to_json(state), what=_WHAT)]
            decisions = decide(states, self._ranks_of_set())
        self._carry_out(decisions)
        if set(modes) == {HAS_JOINED}:
            self.has_joined = False
            self.joined_ranks.clear()
            return False
        if decisions or POLLS in modes:
            return True
        if states:
            self._give_up(stalled(states, self._ranks_of_set()), mode, waited_for)
        return False

    def _glance(self, requests: tuple[Request, ...], mode: int) -> tuple[list[int], bool]:
        """Return every rank's mode, and whether all ask for the same in the same order."""
        exchange = self.session.exchange
        if exchange is None:
            return [mode], bool(requests) or mode != WAITS
        exchange.agree(_AT_A_GLANCE)
        rows = exchange.all_gather(torch.tensor([digest_of(requests), mode]), what=_AT_A_GLANCE).tolist()
        modes: list[int] = [mode for _, mode in rows]
        # Of ranks that have nothing pending, and come for different reasons, it has to be seen whether any can go on.
        has_reason = bool(requests) or POLLS in modes or len(set(modes)) == 1
        return modes, has_reason and len({digest for digest, _ in rows}) == 1

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
        taken = [(decision, self.pending.pop(decision.request.key, None)) for decision in decisions]
        try:
            self._carry_out_taken(taken)
        except BaseException as error:
            for _, operation in taken:
                if operation is not None and not operation.is_done:
                    operation.end(_broken_off(operation.request, error))
            raise

    def _carry_out_taken(self, taken: Sequence[tuple[Decision, Pending | None]]) -> None:
        sent: list[tuple[Pending | None, Work]] = []
        steps: list[tuple[Pending | None, str]] = []
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

    def _work(self, request: Request, operation: Pending | None) -> Work:
        members = self.members[request.set_id]
        if operation is None:
            device = torch.device(self.session.world.device if request.device != "cpu" else "cpu")
            tensors: Sequence[torch.Tensor] = stand_ins(request, device)
        else:
            tensors = operation.tensors
        return Work(
            request=request,
            group=members.group,
            size=len(members.ranks),
            tensors=tensors,
            is_in_place=operation is not None and operation.is_in_place,
            splits=operation.splits if operation is not None else (),
        )

    def _step(self, name: str, operation: Pending | None) -> None:
        if operation is None:
            if name not in self.as_joined:
                raise HorovodInternalError(
                    f"This rank has called join(), and does not know {name!r}, which the others do.",
                    do="make the same optimizers on every rank before hvd.join()",
                )
            self.as_joined[name]()
            return
        if operation.take_part is not None:
            operation.take_part()
        operation.end()

    def _give_up(self, error: HorovodInternalError, mode: int, waited_for: Pending | None) -> None:
        """End the wait of this rank with an error, and leave everything else as it is."""
        if waited_for is not None:
            self.pending.pop(waited_for.request.key, None)
            waited_for.end(error)
        elif mode == HAS_JOINED:
            self.has_joined = False
            raise error


_open: list[Queue] = []


def current_queue() -> Queue:
    """Return what ``hvd.init()`` has opened.

    Raises:
        ConfigurationError: it has not been called, or the world has been left.
    """
    queue = current_queue_or_none()
    if queue is None:
        raise not_initialized()
    return queue


def current_queue_or_none() -> Queue | None:
    """Return what ``hvd.init()`` has opened, or ``None``."""
    if _open and _open[0].session is not current_or_none():
        _open.clear()
    return _open[0] if _open else None


def set_current_queue(queue: Queue | None) -> None:
    """Replace the open queue. Called by ``hvd.init()`` and ``hvd.shutdown()`` only."""
    _open[:] = [] if queue is None else [queue]


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
    request = Request(kind=ANNOUNCED, name=name, set_id=set_id, joined_take_part=name in queue.as_joined)
    operation = Pending(request=request, take_part=take_part)
    queue.hold(operation)
    queue.wait(operation)


def _called(mode: int, waited_for: Pending | None) -> str:
    """Return what the user has called, as ``hvd.allreduce 'x'``."""
    if waited_for is None:
        return {HAS_JOINED: "hvd.join()", LEAVES: "hvd.shutdown()"}.get(mode, "hvd.poll()")
    prefix, dot, name = waited_for.request.name.partition(".")
    return f"hvd.{prefix} {name!r}" if dot else f"hvd.{prefix}"


def _broken_off(request: Request, error: BaseException) -> HorovodInternalError:
    return HorovodInternalError(
        f"{request.name!r} was broken off.", evidence=f"{type(error).__name__}: {error}", do="mend that error first"
    )


def _words(mode: int, waited_for: Pending | None) -> str:
    if waited_for is not None:
        request = waited_for.request
        return f"waits for {request.name!r}" + (f", {request}" if request.dtypes else "")
    return {HAS_JOINED: "has called join()", LEAVES: "has come to the end"}.get(mode, "polls")
