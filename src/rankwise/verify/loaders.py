# SPDX-License-Identifier: Apache-2.0
"""The batches that a script takes from its loaders: recorded, permuted, or those of N ranks joined into one.

Replaces the iteration of torch's loaders and of rankwise's, before the script runs. Workers give each batch with the
random numbers that they drew for it. Imported by ``recorder``.
"""

from __future__ import annotations

import zlib
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.utils import data

from rankwise.auto.replacing import replace_attributes, replaced
from rankwise.data import loader as own_loader
from rankwise.data.sources import generator_state
from rankwise.verify import sketches
from rankwise.verify.draws import torch_digest
from rankwise.verify.records import Batch, Loader

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from rankwise.verify.records import Plan
    from rankwise.verify.script_files import ScriptLines

MOST_BYTES = 2**30
"""Of the batches of one rank that are kept for a run on one rank."""


class StepsTaken(SystemExit):
    """Ends the script: it has taken as many steps as were asked for, or there are no more batches of another run."""


class Loaders:
    """The loaders of one process."""

    def __init__(self, plan: Plan, rank: int, lines: ScriptLines, on_loader: Callable[[Loader], None]) -> None:
        self._plan = plan
        self._folder = plan.batches(rank)
        self._lines = lines
        self._on_loader = on_loader
        self.batches_kept = True
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._epochs: dict[int, int] = {}
        self._bytes = 0
        self._taken: list[Batch] = []
        self._is_inside = False
        """Whether a batch of a loader is being made."""

    def install(self) -> None:
        """Replace the iteration of loaders."""
        for kind in (data.DataLoader, own_loader.DataLoader):
            replace_attributes(kind, ["__iter__"], self._following)

    def taken(self) -> list[Batch]:
        """Return the batches that the script has taken since the last call."""
        taken, self._taken = self._taken, []
        return taken

    def _following(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        @wraps(original)
        def iterate(loader: Any) -> Iterator[Any]:
            if self._is_inside:
                # The loader that the script iterates reads from this one.
                return original(loader)
            if self._plan.join:
                return self._joined(loader)
            has_workers = isinstance(loader, data.DataLoader) and loader.num_workers > 0
            with _noting_draws(loader) if has_workers else nullcontext():
                return self._followed(loader, original(loader), by_workers=has_workers)

        return iterate

    def _place(self, loader: Any) -> tuple[int, int]:
        if loader not in self._numbers:
            self._numbers[loader] = len(self._numbers)
            self._on_loader(_described(loader, self._numbers[loader], self._lines.running()))
        number = self._numbers[loader]
        epoch = self._epochs.get(number, 0)
        self._epochs[number] = epoch + 1
        return number, epoch

    def _followed(self, loader: Any, batches: Iterator[Any], *, by_workers: bool) -> Generator[Any]:
        # Counted at the first batch: tqdm.auto makes an iterator that it never uses.
        number, epoch = self._place(loader)
        position = 0
        try:
            while True:
                before = _state_digests()
                self._is_inside = True
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                finally:
                    self._is_inside = False
                # The first one also draws the order and the seed of the workers.
                drawn = _drawn_from(before, _state_digests()) if position else ""
                if by_workers:
                    batch, drawn = batch[0], drawn + batch[1]
                if self._plan.float64:
                    batch = sketches.cast(batch, torch.float64)
                if self._plan.permute:
                    batch = sketches.permuted(batch)
                self._keep(batch, f"{number}-{epoch}-{position}.pt")
                self._taken.append(Batch(number, epoch, _digests(batch), drawn))
                yield batch
                position += 1
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
        if self._plan.keep:
            (self._folder / f"{number}-{epoch}.end").touch()

    def _keep(self, batch: Any, name: str) -> None:
        self._bytes += sum(one.numel() * one.element_size() for one in sketches.tensors_in(batch))
        self.batches_kept = self.batches_kept and self._bytes <= MOST_BYTES
        if self._plan.keep and self.batches_kept:
            try:
                torch.save(batch, self._folder / name)
            except Exception:  # noqa: BLE001 - objects of the script that cannot be pickled
                self.batches_kept = False

    def _joined(self, loader: Any) -> Generator[Any]:
        number, epoch = self._place(loader)
        folders = self._plan.joined_batches
        position = 0
        while found := [path for folder in folders if (path := folder / f"{number}-{epoch}-{position}.pt").exists()]:
            parts = [torch.load(path, weights_only=False) for path in found]
            batch = parts[0] if _are_one(parts) else sketches.joined(parts)
            self._taken.append(Batch(number, epoch, _digests(batch)))
            yield batch
            position += 1
        if not all((folder / f"{number}-{epoch}.end").exists() for folder in folders):
            raise StepsTaken(0)


def _are_one(parts: Sequence[Any]) -> bool:
    """Return whether each rank has the whole batch, as of a loader for an evaluation: all have the same samples."""
    samples = [_digests(part) for part in parts]
    return len(set(samples)) == 1 and len(set(samples[0])) == len(samples[0]) > 0


def _digests(batch: Any) -> tuple[int, ...]:
    rows = sketches.with_rows(sketches.tensors_in(batch))
    return sketches.digests_of_rows(rows) if rows else ()


def _described(loader: Any, number: int, line: str) -> Loader:
    try:
        length = len(loader)
    except TypeError:
        length = None
    sampler = getattr(loader, "sampler", None)
    shuffles = callable(getattr(sampler, "set_epoch", None)) and bool(getattr(sampler, "shuffle", False))
    size = getattr(loader, "batch_size", None)
    return Loader(number, length, size, type(sampler).__name__, shuffles, line)


def _state_digests() -> dict[str, int]:
    """Return a digest of the state of each generator: torch's, Python's, NumPy's."""
    python, (_, keys, position, *_), _ = generator_state()
    return {"torch": torch_digest(), "random": hash(python), "numpy": zlib.crc32(keys.tobytes(), position)}


def _drawn_from(before: dict[str, int], after: dict[str, int]) -> str:
    """Return the generators that were drawn from, with their states before; empty if none was."""
    names = [name for name, state in before.items() if after[name] != state]
    return " ".join(f"{name}:{before[name]:x}" for name in names)


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
        self._states = _state_digests()

    def collate(self, samples: Any) -> tuple[Any, str]:
        """Stand in for ``collate_fn``: return the batch with what the worker drew for it."""
        batch = self._collate(samples)
        before, self._states = self._states, _state_digests()
        return batch, _drawn_from(before, self._states)


@contextmanager
def _noting_draws(loader: data.DataLoader[Any]) -> Generator[None]:
    """Make the workers that start inside the block give each batch with what they drew."""
    draws = WorkerDraws(loader.worker_init_fn, loader.collate_fn)
    with replaced(
        (loader, ["worker_init_fn"], lambda _: draws.begin), (loader, ["collate_fn"], lambda _: draws.collate)
    ):
        yield
