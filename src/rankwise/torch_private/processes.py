# SPDX-License-Identifier: Apache-2.0
"""Processes that torch starts: their rendezvous by URL, spawned ones, workers of loaders; and files that torch saves.

Imports torch when called.
"""

from __future__ import annotations

import functools
import importlib
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess

    from torch.utils.data import DataLoader


def replace_handler(scheme: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    """Replace torch's handler of a URL scheme by ``handler``; return the previous one.

    Source: torch.distributed.rendezvous, whose ``register_rendezvous_handler`` takes new schemes only.
    """
    # torch.distributed exports a function of the same name as this module.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    before: Callable[..., Any] = rendezvous._rendezvous_handlers[scheme]  # noqa: SLF001
    rendezvous._rendezvous_handlers[scheme] = handler  # noqa: SLF001
    return before


def follow_spawns(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have ``torch.multiprocessing.spawn`` run ``wrap(fn)`` in place of ``fn``; what it starts by fork runs ``fn``.

    Source: torch.multiprocessing.start_processes, which ``spawn`` calls.
    """
    # torch.multiprocessing exports a function of the same name as this module.
    spawning: Any = importlib.import_module("torch.multiprocessing.spawn")
    before = spawning.start_processes

    @functools.wraps(before)
    def start(fn: Callable[..., Any], *args: Any, **more: Any) -> Any:
        by_fork = "fork" in (more.get("start_method"), *args[4:5])
        return before(fn if by_fork else wrap(fn), *args, **more)

    exported: Any = importlib.import_module("torch.multiprocessing")
    spawning.start_processes = exported.start_processes = start


def on_save(notify: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``notify`` with the path of each file that torch.save opens by name; return a function that stops this."""
    # A writer in C++, which Python does not see.
    writer: Any = importlib.import_module("torch.serialization")._open_zipfile_writer_file  # noqa: SLF001
    opens = writer.__init__

    @functools.wraps(opens)
    def noted(self: Any, name: Any, *args: Any, **kwargs: Any) -> None:
        notify(name)
        opens(self, name, *args, **kwargs)

    def stop() -> None:
        writer.__init__ = opens

    writer.__init__ = noted
    return stop


# -- loaders ----------------------------------------------------------------------------------------


def wrap_next(wrap: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> Callable[[], None]:
    """Replace the function that yields the next batch of every loader by ``wrap`` of it; return what undoes that."""
    kind: Any = importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter  # noqa: SLF001
    original = kind.__next__
    wrapped = wrap(original)
    kind.__next__ = wrapped

    def undo() -> None:
        # Others may have wrapped it since.
        if kind.__next__ is wrapped:
            kind.__next__ = original

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
    worker: Any = importlib.import_module("torch.utils.data._utils.worker")
    worker._worker_info = info  # noqa: SLF001
