# SPDX-License-Identifier: Apache-2.0
"""The batches that a script takes from its loaders: recorded, permuted, or those of N ranks joined into one.

Replaces the iteration of torch's loaders and of rankwise's, before the script runs. Workers give each batch with the
random numbers that they drew for it. Imported by ``recorder``.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch.utils import data

from rankwise.data import loader as own_loader
from rankwise.tools.replacing import replace_attributes, replaced
from rankwise.tools.verify import sketches
from rankwise.tools.verify.draws import drawn_from, state_digests
from rankwise.tools.verify.records import Batch, Loader

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

MOST_BYTES = 2**30
"""Of the batches of one rank that are kept for a run on one rank."""


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """What is done with batches."""

    float64: bool = False
    permute: bool = False
    keep: str | None = None
    """A folder for this rank's batches."""
    join: tuple[str, ...] = ()
    """The folders of the ranks whose batches are taken instead of the loader's own."""


class Listener(Protocol):
    """Receives what the loaders of the script do."""

    def on_loader(self, loader: Loader) -> None:
        """Note a loader that is iterated for the first time."""
        ...

    def on_batch(self, batch: Batch) -> None:
        """Note a batch that is about to be given to the script."""
        ...

    def line(self) -> str:
        """Return the line of the script that is running."""
        ...

    def stop(self) -> None:
        """End the script: there are no more batches of the other run."""
        ...


class Loaders:
    """The loaders of one process."""

    def __init__(self, plan: LoaderPlan, listener: Listener) -> None:
        self._plan = plan
        self._listener = listener
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._epochs: dict[int, int] = {}
        self._bytes = 0
        self.batches_kept = True
        self._is_inside = False
        """Whether a batch of a loader is being made."""

    def install(self) -> None:
        """Replace the iteration of loaders."""
        for kind in (data.DataLoader, own_loader.DataLoader):
            replace_attributes(kind, ["__iter__"], self._following)

    def _following(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        @wraps(original)
        def iterate(loader: Any) -> Iterator[Any]:
            if self._is_inside:
                # The loader that the script iterates reads from this one.
                return original(loader)
            if self._plan.join:
                return self._joined(loader)
            if has_workers(loader):
                with noting_draws(loader):
                    return self._followed(loader, original(loader), by_workers=True)
            return self._followed(loader, original(loader))

        return iterate

    def _place(self, loader: Any) -> tuple[int, int]:
        if loader not in self._numbers:
            self._numbers[loader] = len(self._numbers)
            self._listener.on_loader(_described(loader, self._numbers[loader], self._listener.line()))
        number = self._numbers[loader]
        epoch = self._epochs.get(number, 0)
        self._epochs[number] = epoch + 1
        return number, epoch

    def _followed(self, loader: Any, batches: Iterator[Any], *, by_workers: bool = False) -> Generator[Any]:
        # Counted at the first batch: tqdm.auto makes an iterator that it never uses.
        number, epoch = self._place(loader)
        position = 0
        try:
            while True:
                before = state_digests()
                self._is_inside = True
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                finally:
                    self._is_inside = False
                # The first one also draws the order and the seed of the workers.
                drawn = drawn_from(before, state_digests()) if position else ""
                if by_workers:
                    batch, drawn = batch[0], drawn + batch[1]
                if self._plan.float64:
                    batch = sketches.in_float64(batch)
                if self._plan.permute:
                    batch = sketches.permuted(batch)
                self._keep(batch, f"{number}-{epoch}-{position}")
                self._listener.on_batch(_recorded(batch, number, epoch, position, drawn))
                yield batch
                position += 1
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
        if self._plan.keep is not None:
            Path(self._plan.keep, f"{number}-{epoch}.end").touch()

    def _keep(self, batch: Any, name: str) -> None:
        if self._plan.keep is None or not self.batches_kept:
            return
        self._bytes += sum(one.numel() * one.element_size() for one in sketches.tensors_in(batch))
        if self._bytes > MOST_BYTES:
            self.batches_kept = False
            return
        try:
            torch.save(batch, Path(self._plan.keep, f"{name}.pt"))
        except Exception:  # noqa: BLE001 - objects of the script that cannot be pickled
            self.batches_kept = False

    def _joined(self, loader: Any) -> Generator[Any]:
        number, epoch = self._place(loader)
        position = 0
        while True:
            paths = [Path(folder, f"{number}-{epoch}-{position}.pt") for folder in self._plan.join]
            found = [path for path in paths if path.exists()]
            if not found:
                if all(Path(folder, f"{number}-{epoch}.end").exists() for folder in self._plan.join):
                    return
                self._listener.stop()
            parts = [torch.load(path, weights_only=False) for path in found]
            batch = parts[0] if _are_one(parts) else sketches.joined(parts)
            self._listener.on_batch(_recorded(batch, number, epoch, position, ""))
            yield batch
            position += 1


def _are_one(parts: Sequence[Any]) -> bool:
    """Return whether each rank has the whole batch, as of a loader for an evaluation: all have the same samples."""
    samples = [_recorded(part, 0, 0, 0, "").digests for part in parts]
    return len(set(samples)) == 1 and len(set(samples[0])) == len(samples[0]) > 0


def _recorded(batch: Any, loader: int, epoch: int, number: int, drawn: str) -> Batch:
    rows = sketches.with_rows(sketches.tensors_in(batch))
    digests = sketches.digests_of_rows(rows) if rows else ()
    return Batch(loader, epoch, number, digests, drawn)


def _described(loader: Any, number: int, line: str) -> Loader:
    try:
        length = len(loader)
    except TypeError:
        length = None
    sampler = getattr(loader, "sampler", None)
    shuffles = callable(getattr(sampler, "set_epoch", None)) and bool(getattr(sampler, "shuffle", False))
    return Loader(
        number,
        type(loader).__name__,
        length,
        getattr(loader, "batch_size", None),
        type(sampler).__name__,
        shuffles,
        line,
    )


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
