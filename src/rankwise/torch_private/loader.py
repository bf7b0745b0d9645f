# SPDX-License-Identifier: Apache-2.0
"""The worker processes of torch's DataLoader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data._utils import worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess

    from torch.utils.data import DataLoader


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Make a loader with persistent workers start new ones."""
    loader._iterator = None  # noqa: SLF001


def end_workers(iterator: Iterator[Any]) -> None:
    """End the workers of an iterator and wait for them."""
    iterator._shutdown_workers()  # type: ignore[attr-defined] # noqa: SLF001


def workers_of(iterator: Iterator[Any]) -> list[BaseProcess]:
    """Return the worker processes of an iterator, in the order of their numbers."""
    return iterator._workers  # type: ignore[attr-defined] # noqa: SLF001


def show_worker(info: object) -> None:
    """Set what ``get_worker_info()`` returns in this process."""
    worker._worker_info = info  # type: ignore[assignment] # noqa: SLF001
