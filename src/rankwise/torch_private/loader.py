# SPDX-License-Identifier: Apache-2.0
"""The iterators and worker processes of torch's DataLoader."""

from __future__ import annotations

from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

from torch.utils.data import dataloader
from torch.utils.data._utils import worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess

    from torch.utils.data import DataLoader


def wrap_next(wrap: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> Callable[[], None]:
    """Replace the function that yields the next batch of every loader by ``wrap`` of it; return what undoes that."""
    kind = dataloader._BaseDataLoaderIter  # noqa: SLF001
    original = kind.__next__
    wrapped = wrap(original)
    kind.__next__ = wrapped  # type: ignore[method-assign]

    def undo() -> None:
        # Others may have wrapped it since.
        if kind.__next__ is wrapped:
            kind.__next__ = original  # type: ignore[method-assign]

    return undo


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Make a loader with persistent workers start new ones."""
    loader._iterator = None  # noqa: SLF001


end_workers: Callable[[Iterator[Any]], None] = methodcaller("_shutdown_workers")
"""End the workers of an iterator and wait for them."""
workers_of: Callable[[Iterator[Any]], list[BaseProcess]] = attrgetter("_workers")
"""Return the worker processes of an iterator, in the order of their numbers."""


def show_worker(info: object) -> None:
    """Set what ``get_worker_info()`` returns in this process."""
    worker._worker_info = info  # type: ignore[assignment] # noqa: SLF001
