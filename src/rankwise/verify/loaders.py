# SPDX-License-Identifier: Apache-2.0
"""The batches that a script takes from its loaders, and random numbers that belong to their rows.

In a run whose batches are permuted, or those of N ranks joined into one, dropout's masks and noise move with the rows:
they are those of the run that it is compared with. Replaces the iteration of torch's loaders and of rankwise's, and
torch's functions that draw, before the script runs. Workers give each batch with the random numbers that they drew for
it. Imported by ``recorder``.
"""

from __future__ import annotations

import zlib
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional
from torch.utils import data

from rankwise.auto.replacing import replace_attributes, replaced
from rankwise.data import loader as own_loader
from rankwise.data.sources import generator_state
from rankwise.tensors.arrays import memory_of
from rankwise.verify import sketches
from rankwise.verify.records import Batch, Loader
from rankwise.verify.sketches import permutation
from rankwise.world.device.accelerator import random_state, set_random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from rankwise.verify.records import Plan
    from rankwise.verify.script_files import ScriptLines


_DRAWING = (
    (functional, ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")),
    (torch, ("dropout", "randn_like", "rand_like", "bernoulli", "randn", "rand")),
)
"""Functions of a tensor, or of a size, whose first dim may be the rows."""


State = tuple[torch.Tensor, ...]
"""Of torch's generators: the processor's, and the accelerator's if the process uses one."""


def _places() -> list[torch.device]:
    """Return the CPU, and the accelerator if this process uses one."""
    kind = torch.accelerator.current_accelerator()
    is_initialized = None if kind is None else getattr(torch.get_device_module(kind), "is_initialized", None)
    if kind is None or is_initialized is None or not is_initialized():
        return [torch.device("cpu")]
    return [torch.device("cpu"), torch.device(kind.type, torch.accelerator.current_device_index())]


def torch_state() -> State:
    """Return the state of torch's generators."""
    return tuple(map(random_state, _places()))


def set_torch_state(state: State) -> None:
    """Put torch's generators into a state that :func:`torch_state` returned."""
    for place, own in zip(_places(), state, strict=False):
        set_random_state(place, own)


def torch_digest() -> int:
    """Return a digest of the state of torch's generators alone."""
    digest = 0
    for one in torch_state():
        digest = zlib.crc32(memory_of(one.cpu()), digest)
    return digest


class RowDraws:
    """The draws of one process: during a call of a model, from :meth:`begin` to :meth:`end`."""

    def __init__(self, *, permutes: bool) -> None:
        self._permutes = permutes
        self._is_permuted = permutes
        self._rows: int | None = None
        self._parts: Sequence[int] = ()
        self._states: list[State] = []
        self._digest = 0
        self._before = 0
        self._is_by_rows = True
        self._is_inside = False

    def install(self) -> None:
        """Replace torch's functions that draw, before the script imports them."""
        for module, names in _DRAWING:
            replace_attributes(module, names, self._by_rows)

    def begin(
        self, rows: int, parts: Sequence[int] = (), states: Sequence[State] = (), *, is_permuted: bool = True
    ) -> None:
        """Begin a call of a model.

        Args:
            rows: samples of the batch.
            parts: of each rank whose batch was joined into this one.
            states: the state of torch's generators on each of these ranks; empty if they drew nothing.
            is_permuted: whether the rows are permuted in a run that permutes: only batches of loaders are.
        """
        self._is_permuted = self._permutes and is_permuted
        self._rows = rows
        self._parts = parts
        self._states = list(states)
        self._before = self._digest = torch_digest()
        self._is_by_rows = True

    def end(self) -> tuple[bool, bool]:
        """End the call; return whether it drew, and whether all that it drew belonged to rows."""
        self._rows = None
        now = torch_digest()
        return now != self._before, self._is_by_rows and now == self._digest

    def _by_rows(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            if self._rows is None or self._is_inside:
                return original(*args, **kwargs)
            self._is_inside = True
            try:
                return self._draw(original, args, kwargs)
            finally:
                self._is_inside = False

        return draw

    def _draw(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = _rows_of(args, kwargs)
        if torch_digest() != self._digest:
            self._is_by_rows = False
        if rows != self._rows or not rows:
            result = original(*args, **kwargs)
            if torch_digest() != self._digest:
                self._is_by_rows = False
        elif self._states and sum(self._parts) == rows:
            result = self._draw_for_ranks(original, args, kwargs)
        elif self._is_permuted:
            first, order = args[0], permutation(rows)
            if isinstance(first, torch.Tensor):
                order = order.to(first.device)
                args = (first[order.argsort()], *args[1:])
            result = original(*args, **kwargs)
            result = result[order.to(result.device)]
        else:
            result = original(*args, **kwargs)
        self._digest = torch_digest()
        return result

    def _draw_for_ranks(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = torch_state()
        results: list[Any] = []
        start = 0
        for rank, size in enumerate(self._parts):
            set_torch_state(self._states[rank])
            results.append(original(*_part(args, start, size), **kwargs))
            self._states[rank] = torch_state()
            start += size
        set_torch_state(own)
        return torch.cat(results)


def _rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    first = args[0] if args else None
    if isinstance(first, torch.Tensor):
        return first.shape[0] if first.dim() and not kwargs.get("inplace") else None
    size = first[0] if isinstance(first, list | tuple) and first else first
    return size if isinstance(size, int) and kwargs.get("generator") is None else None


def _part(args: tuple[Any, ...], start: int, size: int) -> tuple[Any, ...]:
    """Return the arguments for some rows: of the tensor, or of the size."""
    if isinstance(args[0], torch.Tensor):
        return (args[0][start : start + size], *args[1:])
    if isinstance(args[0], list | tuple):
        return ((size, *args[0][1:]), *args[1:])
    return (size, *args[1:])


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
