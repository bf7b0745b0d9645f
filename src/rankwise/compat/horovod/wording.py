# SPDX-License-Identifier: Apache-2.0
"""What a wait is called: where this rank reads it, and where the others do. Used by queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.compat.horovod.errors import HorovodInternalError
from rankwise.compat.horovod.request import HAS_JOINED, LEAVES, POLLS

if TYPE_CHECKING:
    from rankwise.compat.horovod.pending import Pending
    from rankwise.compat.horovod.request import Request


def called(mode: int, waited_for: Pending | None) -> str:
    """Return what the user has called, as ``hvd.allreduce 'x'``."""
    if waited_for is None or mode == POLLS:
        return {HAS_JOINED: "hvd.join()", LEAVES: "hvd.shutdown()"}.get(mode, "hvd.poll()")
    prefix, dot, name = waited_for.request.name.partition(".")
    return f"hvd.{prefix} {name!r}" if dot else f"hvd.{prefix}"


def broken_off(request: Request, error: BaseException) -> HorovodInternalError:
    """Return the error of an operation during which another one failed."""
    return HorovodInternalError(
        f"{request.name!r} was broken off.", evidence=f"{type(error).__name__}: {error}", do="mend that error first"
    )


def waits_for(mode: int, waited_for: Pending | None) -> str:
    """Return what a rank waits for, for the other ranks to read."""
    if waited_for is not None and mode != POLLS:
        request = waited_for.request
        return f"waits for {request.name!r}" + (f", {request}" if request.dtypes else "")
    return {HAS_JOINED: "has called join()", LEAVES: "has come to the end"}.get(mode, "polls")
