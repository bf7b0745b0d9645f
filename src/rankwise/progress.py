# SPDX-License-Identifier: Apache-2.0
"""One progress bar and one print for all ranks, on rank zero."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any, TypeVar

from rankwise.comm.session import current_or_none

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


def _is_rank_zero() -> bool:
    session = current_or_none()
    return session is None or session.world.rank == 0


def progress(iterable: Iterable[T], **options: Any) -> Iterator[T]:  # noqa: ANN401 - tqdm's own
    """Iterate with a progress bar on rank zero, and plainly on the others.

    Args:
        iterable: for example a :class:`rankwise.DataLoader`.
        options: passed to ``tqdm.auto.tqdm`` (``desc``, ``leave``, ...).
    """
    if not _is_rank_zero():
        yield from iterable
        return
    from tqdm.auto import tqdm  # noqa: PLC0415 - costs import time that only bars should pay

    yield from tqdm(iterable, **options)


def print(*values: object, all_ranks: bool = False, **options: Any) -> None:  # noqa: A001, ANN401 - replaces print
    """Print on rank zero; with ``all_ranks``, on every rank, prefixed with the rank.

    Args:
        values: as for the built-in ``print``.
        all_ranks: print on every rank that calls.
        options: as for the built-in ``print``.
    """
    session = current_or_none()
    if all_ranks and session is not None and session.world.world_size > 1:
        builtins.print(str(session.world), *values, **options)  # noqa: T201 - its purpose
    elif _is_rank_zero():
        builtins.print(*values, **options)  # noqa: T201 - its purpose
