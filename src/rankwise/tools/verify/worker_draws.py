# SPDX-License-Identifier: Apache-2.0
"""Random numbers that the workers of a torch loader draw while they read: each batch comes with them.

A worker runs ``collate_fn`` after it has read the samples of a batch, so that is where it is asked.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

from torch.utils import data

from rankwise.tools.replacing import replaced
from rankwise.tools.verify.draws import drawn_from, state_digests

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


class WorkerDraws:
    """Stands in for the ``worker_init_fn`` and the ``collate_fn`` of a loader; pickled into its workers."""

    def __init__(self, init: Callable[[int], None] | None, collate: Callable[[Any], Any]) -> None:
        self._init = init
        self._collate = collate
        self._states: dict[str, int] = {}

    def begin(self, worker: int) -> None:
        """Stand in for ``worker_init_fn``."""
        if self._init is not None:
            self._init(worker)
        self._states = state_digests()

    def collate(self, samples: Any) -> tuple[Any, str]:
        """Stand in for ``collate_fn``."""
        batch = self._collate(samples)
        before, self._states = self._states, state_digests()
        return batch, drawn_from(before, self._states)


def has_workers(loader: object) -> TypeGuard[data.DataLoader[Any]]:
    """Tell whether a loader of torch reads in worker processes."""
    return isinstance(loader, data.DataLoader) and loader.num_workers > 0


@contextmanager
def noting_draws(loader: data.DataLoader[Any]) -> Generator[None]:
    """Make the workers that start inside the block give each batch with what they drew, as a tuple of two."""
    draws = WorkerDraws(loader.worker_init_fn, loader.collate_fn)
    with replaced(
        (loader, ["worker_init_fn"], lambda _: draws.begin), (loader, ["collate_fn"], lambda _: draws.collate)
    ):
        yield
