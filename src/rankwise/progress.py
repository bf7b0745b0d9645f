# SPDX-License-Identifier: Apache-2.0
"""One progress bar and one print for all ranks, on rank zero."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any, TypeVar

from rankwise.errors import ConfigurationError
from rankwise.log import is_rank_zero, rank_prefix

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


def progress(iterable: Iterable[T], **options: Any) -> Iterator[T]:
    """Iterate with a progress bar on rank zero, and plainly on the others.

    Args:
        iterable: for example a :class:`rankwise.DataLoader`.
        options: passed to ``tqdm.auto.tqdm`` (``desc``, ``leave``, ...).
    """
    if not (hasattr(iterable, "__iter__") or hasattr(iterable, "__getitem__")):
        raise ConfigurationError(
            f"progress() takes what can be iterated, got a {type(iterable).__name__}.",
            do="pass the loader, or range(num_steps): for batch in rankwise.progress(loader)",
        )
    if not is_rank_zero():
        yield from iterable
        return
    from tqdm.auto import tqdm  # noqa: PLC0415 - costs import time that only bars should pay

    yield from tqdm(iterable, **options)


def print(*values: object, all_ranks: bool = False, **options: Any) -> None:  # noqa: A001 - replaces print
    """Print on rank zero; with ``all_ranks``, on every rank, prefixed with the rank.

    Args:
        values: as for the built-in ``print``.
        all_ranks: print on every rank that calls.
        options: as for the built-in ``print``.
    """
    if all_ranks and rank_prefix():
        builtins.print(rank_prefix(), *values, **options)  # noqa: T201 - its purpose
    elif is_rank_zero():
        builtins.print(*values, **options)  # noqa: T201 - its purpose
