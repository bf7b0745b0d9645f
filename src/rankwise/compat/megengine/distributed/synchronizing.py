# SPDX-License-Identifier: Apache-2.0
"""A function after which all ranks wait for one another. Imported by users."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from rankwise.compat.megengine.distributed.groups import group_barrier

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


def synchronized(func: Callable[P, T]) -> Callable[P, T]:
    """Have every call of ``func`` return when every rank has come to its end; decorator.

    Called by: what it makes, every rank, in the same order. For one rank first, as for a download, there is
    :func:`rankwise.rank_zero_first`.
    """

    @wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        result = func(*args, **kwargs)
        group_barrier()
        return result

    return wrapper
