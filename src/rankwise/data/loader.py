# SPDX-License-Identifier: Apache-2.0
"""The loader a training loop iterates: this rank's part of each global batch, on its device.

Combines order, shards, reading and moving; each has its own file.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import cache, partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Never

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

from rankwise import meter
from rankwise.comm.agreement import all_ranks_succeed
from rankwise.comm.current_batch import CurrentBatch
from rankwise.comm.session import current, current_or_none
from rankwise.data.batches import Batch, divided, pin, to_device
from rankwise.data.same_data import Prober, check_same_block, check_with_peers
from rankwise.data.sampler import EpochPosition
from rankwise.data.sampler_order import GivenBatches, check_batches, check_order, given_order
from rankwise.data.shards import (
    EpochCursor,
    Shards,
    State,
    local_batches,
    local_parts,
    make_shards,
    note_on_share,
    note_on_short_batch,
)
from rankwise.data.sources import (
    ColumnSource,
    FetchedBatch,
    SampleSource,
    StreamSource,
    columns_of,
    is_stream,
    length_of,
)
from rankwise.data.workers import WorkerOptions, Workers
from rankwise.errors import ConfigurationError, DatasetError
from rankwise.health.preemption import StepSource
from rankwise.meter import DATA, EVALUATION
from rankwise.world.device import accelerator
from rankwise.world.device.choice import device_named
from rankwise.world.device.kinds import KINDS
from rankwise.world.device.streams import can_pin, pins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rankwise.comm.session import Loop, Session

TIMEOUT_SECONDS = 1800.0
"""How long workers may take for one batch, by default."""

_TORCH_WORDS = {
    "batch_size": "pass global_batch_size (samples per step of all ranks together: the result does "
    "not depend on the number of ranks), or local_batch_size (samples per step of each rank)",
    "drop_last": 'pass remainder="drop" for drop_last=True, remainder="keep" for drop_last=False',
    "generator": "pass seed= instead",
    "timeout": "pass timeout_seconds=",
}


class DataLoader(StepSource, EpochPosition):
    """Yield this rank's part of each global batch, on this rank's device.

    An epoch shows every sample exactly once, over all ranks, whatever their number; which samples
    form a global batch, and their order, does not depend on it (with
    ``global_batch_size``). The loader tracks its epoch, and there is no ``set_epoch``: each ``for``
    that reaches its end is followed by the next epoch.

    **What a dataset may be.** A map-style dataset; an iterable one; a tensor, a NumPy array, a
    tuple or dict of them. Tensors, arrays and ``TensorDataset`` (and ``Subset`` of them) are
    indexed a whole batch at a time, in this process: workers would only add copying. A dataset with
    ``__getitems__`` reads its batch through that.

    **Random augmentation.** Before each ``dataset[i]``, Python's ``random``, NumPy's legacy
    generator, torch's CPU generator and every part of the dataset with MONAI's ``set_random_state``
    are seeded by ``(seed, epoch, i)``, and the process's generators restored after the batch: a
    sample is augmented the same on any number of ranks and workers, and after a resume. So are the
    generators of Python, NumPy and torch that are attributes of the dataset or its ``transform``.
    This does not hold for a random ``collate_fn`` or ``__getitems__``, nor for generators that are
    elsewhere.

    **Uneven ends.** With ``remainder="keep"`` the last global batch of an epoch may be short. It is
    split as evenly as possible, and a rank for which nothing is left gets a batch of no samples, of
    the right shapes and dtypes: it takes part in the step with weight zero.

    **Iterable datasets.** Every rank reads the whole stream (and each of its workers does) and
    keeps its part, so that batches are the same on any number of ranks; this costs reading
    everything on each rank. If that is too much, make the dataset map-style. A dataset that
    divides itself by torch's ``get_worker_info`` sees no worker here; one that divides itself
    by rank must not do so. Resuming reads and skips. A global batch is held in memory.

    **Batches of any size.** ``batch_sampler=`` yields the global batches: each a list of indices, of any number of
    samples, which is split over the ranks. With ``batch_size=None``, as in torch's loader, the dataset returns whole
    batches: every rank reads each of them and keeps its rows, so that a batch must hold tensors and lists with one row
    per sample. ``state_dict`` works with both.

    **Leaving early.** ``break`` keeps the position for ``state_dict``. The next
    ``for`` begins the next epoch, as a torch loader would draw a new order; only after
    ``load_state_dict`` does it continue mid-epoch. If only one batch was taken, as by
    ``next(iter(loader))``, that counts as a look at the data, and the next ``for`` begins where
    that one did.

    **The same data on every rank.** With several ranks, construction compares the dataset between them: the indices
    of ``Subset``, the names of files in lists of the dataset, and a few samples (256 rows of tensors and arrays; else
    4: first, last and two between), read as the loader reads them. An error names the first one that differs: a split
    by an unseeded generator, unseeded synthetic data, ``os.listdir`` in another order. Values that differ at each
    read, or cannot be read, are skipped. An iterable dataset is compared by the first batch of each epoch, without
    extra reads.

    Its many fields are read by every epoch: what the script passed, how an epoch is divided, and what reads it.

    Called by: every rank, in the same order, to construct. Iterating waits for no rank.

    Args:
        dataset: see above; the same on every rank.
        global_batch_size: samples per step of all ranks together. Exactly one of the two sizes.
        local_batch_size: samples per step of each rank.
        shuffle: another random order each epoch, a pure function of ``(seed, epoch)`` that is
            computed on demand and never stored.
        sampler: the order of an epoch for all ranks together, instead of ``shuffle``: any iterable of indices with a
            length, as ``torch.utils.data.WeightedRandomSampler``. Iterated once per epoch on each rank, with the
            generators it draws from seeded by ``(seed, epoch)`` (see ``docs/loading.md``).
        batch_sampler: the global batches of an epoch, for all ranks together, instead of a size and an order: any
            iterable of lists of indices. Seeded and iterated as ``sampler``.
        seed: any integer, the same on every rank. Determines the order and the augmentation.
        remainder: ``"keep"`` or ``"drop"`` the last global batch of an epoch if it is short.
        num_workers: processes that read ahead; 0 reads in this one.
        collate_fn: makes a batch of a list of samples. Default: torch's.
        pin_memory: copy through page-locked memory. Default: if the device copies faster from there (GPUs).
        prefetch_factor: batches each worker reads ahead. Default: torch's, 2.
        persistent_workers: keep the workers between epochs.
        device: where batches go. Default: the world's device.
        worker_init_fn: called in each worker with its number, before it reads.
        multiprocessing_context: how workers are started. Default: ``"fork"`` if the system has it.
        timeout_seconds: limit for one batch from the workers.
        compare_samples: ``False`` if the data of the ranks differ on purpose, or reading a sample changes the dataset.

    Raises:
        ConfigurationError: invalid or contradictory arguments, or arguments that differ between ranks.
        DatasetError: the dataset is empty, or not the same on every rank. While iterating: ``dataset[i]`` or
            ``collate_fn`` raised (that is the ``__cause__``), a worker died, the sampler gave the ranks different
            orders, or a stream gave them different samples.
        NotJoined: there is no world.
    """

    def __init__(
        self,
        dataset: Any,
        *unnamed: Never,
        global_batch_size: int | None = None,
        local_batch_size: int | None = None,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        seed: int = 0,
        remainder: str = "keep",
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Batch] | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        device: str | torch.device | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        compare_samples: bool = True,
        **unknown: object,
    ) -> None:
        world = current().world
        self.dataset = dataset
        self.seed = seed
        self.shuffle = shuffle
        self.sampler = sampler
        self.device = torch.device(world.device) if device is None else _available(device)
        self._cursor = EpochCursor()
        self._pin = pins(self.device) if pin_memory is None else pin_memory and can_pin()
        ranks = current().data_rank("a DataLoader")
        self._number = current().new_loader()
        self._where = str(world)
        # As torch's loader: batch_size=None is for a dataset of batches.
        self._is_ready = unknown.get("batch_size", 0) is None
        with all_ranks_succeed("DataLoader"):
            _refuse_unknown(unnamed, unknown)
            _refuse_own(dataset)
            _refuse_batches(dataset, collate_fn, is_ready=self._is_ready)
            options = WorkerOptions(
                num_workers=num_workers,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
                pin_memory=self._pin,
                timeout_seconds=timeout_seconds,
                worker_init_fn=worker_init_fn,
                multiprocessing_context=multiprocessing_context,
            )
            options.check()
            self._is_stream = is_stream(dataset)
            sizes = {"global_batch_size": global_batch_size, "local_batch_size": local_batch_size}
            self._check_order_and_batches(batch_sampler, sizes, remainder)
            columns = None if self._is_stream or self._is_ready or collate_fn is not None else columns_of(dataset)
            self._length = None if self._is_stream else length_of(dataset if columns is None else columns)
            self._given = given_order(sampler, batch_sampler, self._length or 0, seed)
            has_sampler = batch_sampler is not None
            self._shards, self._parts = self._divide(sizes, remainder, ranks, has_batch_sampler=has_sampler)
        compares = compare_samples and world.world_size > 1
        self._source = self._open_source(columns, collate_fn, compares=compares)
        stop_signals = current().preemption.signals
        in_process = num_workers == 0 or columns is not None
        prober = None
        if not isinstance(self._source, StreamSource):
            prober = Prober(self._source, None if in_process else options, self._where, stop_signals)
        settings = self._compared_facts(compare_samples=compare_samples)
        check_with_peers(settings, dataset if compares else None, prober if compares else None)
        dims = cache(dict[str, int] if prober is None else prober.dims_of_samples)
        self._dims = None if collate_fn is None or self._is_ready else dims
        self._workers = None if in_process else Workers(self._source, options, self._where, stop_signals)

    def _check_order_and_batches(
        self, batch_sampler: Iterable[Sequence[int]] | None, sizes: dict[str, int | None], remainder: str
    ) -> None:
        """Raise if the order of an epoch, or its batches, are given twice."""
        order: dict[str, object] = {"shuffle": self.shuffle, "sampler": self.sampler}
        check_order(self.dataset, is_stream=self._is_stream, seed=self.seed, shuffle=self.shuffle, sampler=self.sampler)
        check_batches(
            self.dataset,
            is_stream=self._is_stream,
            is_ready=self._is_ready,
            batch_sampler=batch_sampler,
            **sizes,
            remainder=remainder != "keep",
            **({} if batch_sampler is None else order),
        )

    def _divide(
        self, sizes: dict[str, int | None], remainder: str, ranks: tuple[int, int], *, has_batch_sampler: bool
    ) -> tuple[Shards, Shards]:
        """Return how samples are read on this rank, and which part of each global batch it takes."""
        rank, world_size = ranks
        num = (self._length or 0) if self.sampler is None or self._given is None else len(self._given)
        # Of any number of samples, unless the loader forms the batches.
        any_size = Shards(length=0, global_batch_size=0, remainder="keep", rank=rank, world_size=world_size)
        if self._is_ready:
            # Every rank reads each of the dataset's batches, and keeps its part.
            return replace(any_size, length=num, global_batch_size=1, rank=0, world_size=1), any_size
        if has_batch_sampler:
            return any_size, any_size
        shards = make_shards(num, **sizes, remainder=remainder, rank=rank, world_size=world_size)
        return shards, shards

    def _open_source(
        self, columns: ColumnSource | None, collate_fn: Callable[[list[Any]], Batch] | None, *, compares: bool
    ) -> ColumnSource | SampleSource | StreamSource:
        """Return what reads the samples."""
        if columns is not None:
            return columns
        if self._is_ready:
            collate: Callable[[list[Any]], Batch] = partial(_as_returned, collate_fn or default_convert)
        else:
            collate = collate_fn or default_collate
        if self._is_stream:
            finds_dims = collate_fn is not None and not self._is_ready
            return StreamSource(
                self.dataset, collate, self._shards, self.seed, self._where, compares=compares, finds_dims=finds_dims
            )
        # The samples of a dataset of batches are whole batches, on every rank.
        collates = "samples" if self._is_ready else "batches"
        return SampleSource(self.dataset, collate, self.seed, self._where, collates)

    @property
    def global_batch_size(self) -> int:
        """Samples per step of all ranks together; a loader with batches of any size has no such attribute."""
        if not self._parts.global_batch_size:
            raise AttributeError("The global batches of this loader have no fixed size.")
        return self._parts.global_batch_size

    @property
    def batch_size(self) -> int:
        """Samples of a whole global batch that this rank takes; the first ranks take one more if it does not divide."""
        low, high = self._parts.local_part(0, self.global_batch_size)
        return high - low

    def __len__(self) -> int:
        """Return the number of global batches of a whole epoch, the same on every rank; of the current one.

        Raises:
            TypeError: the dataset is iterable and has no length.
        """
        if self._is_stream:
            return replace(self._shards, length=len(self.dataset)).num_batches()
        if isinstance(self._given, GivenBatches):
            return len(self._given.ends_of_epoch(self._cursor.epoch))
        return self._shards.num_batches()

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's batches, from the loaded position, else from 0."""
        session = current_or_none()
        loop = None if session is None else session.loop
        return self._batches() if loop is None else self._batches_within(loop, session)

    def _batches_within(self, loop: Loop, session: Session | None) -> Iterator[Batch]:
        """Yield this rank's batches in a loop that not all ranks do the same around; none on one that takes none."""
        if loop.is_server:
            iteration = self._cursor.begin()
            loop.serve_loop(self._number)
            self._cursor.finish(iteration)
        else:
            num_steps = loop.num_steps
            try:
                yield from self._batches()
            except GeneratorExit:
                # By break, or by an error that propagates.
                if current_or_none() is session:
                    loop.break_loop(self._number, has_stepped=loop.num_steps != num_steps)
                raise
            loop.finish_loop(self._number, has_stepped=loop.num_steps != num_steps)

    def _batches(self) -> Iterator[Batch]:
        iteration = self._cursor.begin()
        position = self._cursor.start
        share_note = note_on_share(self._parts)
        full_part = self._parts.local_part(0, self._parts.global_batch_size)
        batches = self._fetched(self._cursor.epoch, position)
        if self._is_ready:
            batches = self._divided(batches)
        if self.device.type != "cpu":
            moved = to_device(((one._replace(batch=None), one.batch) for one in batches), self.device)
            batches = (one._replace(batch=batch) for one, batch in moved)
        self._continue()
        while True:
            # Here the previous step is done and the next one not begun; the end of an epoch is such a point too.
            session = current_or_none()
            if session is not None:
                session.preemption.before_step(self)
            part = meter.current.enter(DATA if torch.is_grad_enabled() else EVALUATION)
            fetched = next(batches, None)
            if fetched is None:
                meter.current.resume(part)
                break
            batch = fetched.batch
            if session is None:
                meter.current.resume(part)
            else:
                taken, failure_note = self._in_hand(position, fetched, full_part)
                meter.current.resume(part, samples=taken.num)
                session.batches.begin_batch(taken, failure_note, share_note)
            position = fetched.stop
            self._cursor.advance(iteration, position)
            in_hand = None if session is None else session.batches.current
            try:
                yield batch
            except GeneratorExit:
                if session is not None:
                    session.batches.break_off(in_hand)
                raise
        if session is not None:
            session.batches.finish_loop(self._number)
        self._cursor.finish(iteration)

    def _in_hand(
        self, position: int, fetched: FetchedBatch, full_part: tuple[int, int]
    ) -> tuple[CurrentBatch, str | None]:
        """Return the batch that follows a position, and a note for errors if it is a short one.

        ``full_part`` is this rank's part of a full batch.
        """
        start, stop = (position, fetched.stop) if fetched.num_given is None else (0, fetched.num_given)
        is_full = stop - start == self._parts.global_batch_size > 0
        first, end = full_part if is_full else self._parts.local_part(0, stop - start)
        if isinstance(self._given, GivenBatches):
            number = int(self._given.ends_of_epoch(self._cursor.epoch).searchsorted(position, side="right"))
        else:
            number = position // self._shards.global_batch_size
        taken = CurrentBatch(
            self._number,
            self._cursor.epoch,
            number,
            end - first,
            stop - start,
            first,
            fetched.batch,
            get_ident(),
            self._dims,
            None if self._is_stream or self._is_ready else partial(self._indices, self._cursor.epoch, start, stop),
        )
        return taken, None if is_full else note_on_short_batch(self._parts, start, stop)

    def _indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the places in the dataset of this rank's part of a global batch."""
        found: list[int] = self._order(epoch)(np.arange(*self._parts.local_part(start, stop))).tolist()
        return found

    def state_dict(self) -> State:
        """Return the position of the training loop, JSON-able, the same on every rank.

        Counts the batches that the loop has taken, not those read ahead. Inside the loop's body it counts
        the current batch as done; after the last one it points to the end of the epoch, and the first ``for`` after
        a resume then yields nothing, so that the code after it in the training loop still runs.
        """
        return self._state_at(*self._cursor.place())

    def _fetched(self, epoch: int, start: int) -> Iterator[FetchedBatch]:
        """Read the rest of an epoch, here or in the workers."""
        source, workers = self._source, self._workers
        if isinstance(source, StreamSource):
            batches = source.batches(epoch, start)
            stream = self._pinned(batches) if workers is None else workers.read_stream(epoch, start)
            return self._compared(stream, epoch, start)
        order = self._order(epoch)
        if isinstance(self._given, GivenBatches):
            requests = local_parts(self._shards, order, self._given.ends_of_epoch(epoch), epoch, start)
        else:
            requests = local_batches(self._shards, order, epoch, start)
        if workers is not None:
            return workers.read(requests)
        return self._pinned(FetchedBatch(request.stop, source.fetch(request)) for request in requests)

    def _divided(self, fetched: Iterator[FetchedBatch]) -> Iterator[FetchedBatch]:
        """Yield this rank's part of each batch that the dataset returned."""
        for one in fetched:
            ready = divided(one.batch, self._parts.local_part, self._where)
            yield one._replace(batch=ready.part, num_given=ready.num_samples)

    def _pinned(self, fetched: Iterator[FetchedBatch]) -> Iterator[FetchedBatch]:
        if not self._pin:
            return fetched
        return (read._replace(batch=pin(read.batch)) for read in fetched)

    def _compared(self, fetched: Iterator[FetchedBatch], epoch: int, start: int) -> Iterator[FetchedBatch]:
        """Yield a stream's batches; the first one is compared with the other ranks', and shows the dims of samples."""
        for one in fetched:
            session = current_or_none()
            if one.dims is not None:
                self._dims = partial(dict[str, int], one.dims)
            if one.described and session is not None:
                try:
                    check_same_block(f"{self._number}/{epoch}/{start}", one.described, session.world.node_rank)
                except DatasetError as error:
                    if isinstance(fetched, Generator):
                        fetched.throw(error)
                    raise
            yield one


def _as_returned(convert: Callable[[Any], Batch], items: list[Any]) -> Batch:
    """Return the batch that the dataset returned, as the collate function of the one item that a step takes."""
    (item,) = items
    return convert(item)


def _available(device: str | torch.device) -> torch.device:
    """Return the device that the script names; raise if this process has no such device."""
    named = device_named(device)
    if named.type in KINDS and accelerator.found_kind() is None:
        raise ConfigurationError(
            f"The loader was given device={str(named)!r}, but torch finds no accelerator in this process.",
            do="leave device= out: batches then go to world.device",
        )
    return named


def _refuse_own(dataset: object) -> None:
    """Raise if a dataset is a loader of rankwise's, whose batches are parts already."""
    if isinstance(dataset, DataLoader):
        raise ConfigurationError(
            "The dataset is a rankwise.DataLoader, which already yields this rank's part of each global batch.",
            do="pass torch.utils.data.DataLoader(dataset, batch_size=...) as the dataset: with "
            "batch_size=None each of its batches is divided among the ranks by rows",
        )


def _refuse_batches(dataset: object, collate_fn: object, *, is_ready: bool) -> None:
    """Raise if a dataset is torch's loader, and its batches would become samples of a batch."""
    yields_batches = isinstance(dataset, torch.utils.data.DataLoader) and dataset.batch_sampler is not None
    if yields_batches and not is_ready and collate_fn is None:
        raise ConfigurationError(
            "The dataset is itself a DataLoader: each of its batches would become one sample of a larger batch.",
            do="pass its dataset: rankwise.DataLoader(loader.dataset, global_batch_size=...)\n"
            "or batch_size=None, which divides each of its batches among the ranks; or, if whole batches are meant as "
            "samples, collate_fn=",
        )


def _refuse_unknown(unnamed: tuple[object, ...], unknown: dict[str, object]) -> None:
    """Raise for arguments that the loader does not have, naming what to use instead of torch's."""
    if unnamed:
        size = unnamed[0] if type(unnamed[0]) is int else "..."
        raise ConfigurationError(
            "Only the dataset can be passed to rankwise.DataLoader without a name.",
            do=f"name the batch size: rankwise.DataLoader(dataset, global_batch_size={size})",
        )
    for name, given in unknown.items():
        if name in _TORCH_WORDS and not (name == "batch_size" and given is None):
            raise ConfigurationError(f"rankwise.DataLoader does not support {name}=.", do=_TORCH_WORDS[name])
    names = ", ".join(name for name in unknown if name != "batch_size")
    if names:
        raise ConfigurationError(
            f"rankwise.DataLoader has no argument {names}.",
            do="use one of global_batch_size, local_batch_size, shuffle, sampler, batch_sampler, seed, remainder, "
            "num_workers, collate_fn, pin_memory, prefetch_factor, persistent_workers, device, "
            "worker_init_fn, multiprocessing_context, timeout_seconds, compare_samples",
        )
