# SPDX-License-Identifier: Apache-2.0
"""One operation: as other ranks know it, as this rank holds it until its result is returned, and in error messages."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise.compat.horovod.reduce_ops import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from rankwise.comm.collectives import Group


ANNOUNCED = "step"
"""The kind of a step that sends nothing itself, and runs on the ranks that announce it."""
ROWS_MAY_DIFFER = ("allgather", "alltoall")
"""The kinds whose tensors need not have the same first dimension on all ranks."""

POLLS, WAITS, LEAVES, HAS_JOINED = range(4)
"""Why a rank waits: only ``POLLS`` ends when nothing has happened."""

Key = tuple[int, str]


class OperationRequest(NamedTuple):
    """One operation, as it is sent to the other ranks."""

    kind: str
    name: str
    set_id: int = 0
    op: int = int(ReduceOp.SUM)
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of each tensor; without the first dimension where that may differ between ranks."""
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    allows_joined: bool = True

    @property
    def key(self) -> Key:
        """The key by which requests of different ranks are matched."""
        return self.set_id, self.name

    def __str__(self) -> str:
        tensors = ", ".join(
            f"{dtype}[{', '.join(['rows'] * (self.kind in ROWS_MAY_DIFFER) + [str(size) for size in shape])}]"
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        )
        texts = [tensors] if tensors else []
        if self.kind == "allreduce":
            texts.append(f"op={ReduceOp(self.op).name.title()}")
        if self.kind == "broadcast":
            texts.append(f"root_rank={self.root}")
        if (self.prescale, self.postscale) != (1.0, 1.0):
            texts.append(f"prescale_factor={self.prescale}, postscale_factor={self.postscale}")
        if tensors:
            texts.append(f"on {self.device}")
        return f"{self.kind}({', '.join(texts)})"


@lru_cache(maxsize=256)
def digest_of(requests: tuple[OperationRequest, ...]) -> int:
    """Return a number of 63 bits that is equal for equal requests in equal order."""
    text = repr([tuple(request) for request in requests])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def request_from_json(value: list[Any]) -> OperationRequest:
    """Return the request that JSON turned into a list."""
    request = OperationRequest(*value)
    return request._replace(dtypes=tuple(request.dtypes), shapes=tuple(map(tuple, request.shapes)))


class SetMembers(NamedTuple):
    """The ranks of a process set."""

    ranks: tuple[int, ...]
    group: Group | None
    """``None`` for the world."""


@dataclass(kw_only=True, eq=False)
class PendingOperation:
    """One operation of this rank, from the call that starts it to the call that returns its result."""

    request: OperationRequest
    members: SetMembers
    tensors: Sequence[torch.Tensor] = ()
    """This rank's input, none with a gradient; zeros if it has joined."""
    is_in_place: bool = False
    """Whether the results are written into ``tensors``."""
    splits: Sequence[int] = ()
    """Of an alltoall, the number of rows for each member."""
    take: Callable[[list[torch.Tensor]], Any] = list
    """Makes the call's result from the tensors that arrived."""
    take_part: Callable[[], None] | None = None
    """Of an announced step: runs it, in place of sending tensors."""
    is_done: bool = False
    result: Any = None
    error: Exception | None = None

    def finish(self, tensors: list[torch.Tensor]) -> None:
        """Make the result from the tensors that arrived."""
        try:
            self.result = self.take(tensors)
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits for this request
            self.error = error
        self.end()

    def end(self, error: Exception | None = None) -> None:
        """Mark it as done, and release its tensors."""
        self.error = self.error or error
        self.tensors = ()
        self.is_done = True


def called(mode: int, waited_for: PendingOperation | None) -> str:
    """Return the call that waits, as ``hvd.allreduce 'x'``."""
    if waited_for is None or mode == POLLS:
        return {HAS_JOINED: "hvd.join()", LEAVES: "hvd.shutdown()"}.get(mode, "hvd.poll()")
    prefix, dot, name = waited_for.request.name.partition(".")
    return f"hvd.{prefix} {name!r}" if dot else f"hvd.{prefix}"


def waits_for(mode: int, waited_for: PendingOperation | None) -> str:
    """Return why a rank waits, in words, for error messages on other ranks."""
    if waited_for is not None and mode != POLLS:
        request = waited_for.request
        return f"waits for {request.name!r}" + (f", {request}" if request.dtypes else "")
    return {HAS_JOINED: "has called join()", LEAVES: "has reached the end"}.get(mode, "polls")
