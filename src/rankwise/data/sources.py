# SPDX-License-Identifier: Apache-2.0
"""How the samples of a batch are read: whole columns at once, sample by sample, or from a stream.

While samples are read, the process-wide generators of Python, NumPy and torch have the seed of each sample, so that
augmentation is the same on any rank, in any worker, after a resume; they are restored afterwards.

Knows about ranks only from its arguments, starts no process, does no communication.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from rankwise.comm.session import current_or_none
from rankwise.data.batches import Batch, collated, without_samples
from rankwise.data.epoch_order import epoch_seed, sample_seeds
from rankwise.data.fingerprints import describe_block
from rankwise.errors import ConfigurationError, DatasetError
from rankwise.tensors.arrays import tensors_in

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from rankwise.data.shards import BatchRequest, Shards

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

GeneratorState = tuple[Any, Any, torch.Tensor]
"""States of Python's, NumPy's and torch's CPU generator."""


def seed_generators(seed: int, owners: Iterable[Any] = ()) -> None:
    """Set Python's, NumPy's legacy and torch's CPU generator to a seed of 32 bits, and those of ``owners``.

    Owners are generators, or have generators of their own and ``set_random_state(seed=)``, as MONAI's random transforms
    do.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the generator users' datasets draw from
    torch.default_generator.manual_seed(seed)
    for owner in owners:
        _seed_owner(owner, seed)


def _seed_owner(owner: Any, seed: int) -> None:
    if isinstance(owner, torch.Generator):
        owner.manual_seed(seed)
    elif isinstance(owner, np.random.Generator):
        owner.bit_generator.state = type(owner.bit_generator)(seed).state
    elif isinstance(owner, random.Random | np.random.RandomState):
        owner.seed(seed)
    else:
        owner.set_random_state(seed=seed)


def generator_state() -> GeneratorState:
    """Return the states of the three process-wide CPU generators."""
    numpy_state = np.random.get_state()  # noqa: NPY002 - as in seed_generators
    return random.getstate(), numpy_state, torch.default_generator.get_state()


def set_generator_state(state: GeneratorState) -> None:
    """Set the three process-wide CPU generators to what :func:`generator_state` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002 - as in seed_generators
    torch.default_generator.set_state(state[2])


@contextmanager
def generators_kept() -> Generator[None]:
    """Restore the process-wide generators after the block, whatever it draws or sets."""
    state = generator_state()
    try:
        yield
    finally:
        set_generator_state(state)


@contextmanager
def reading(what: Literal["samples", "batches"]) -> Generator[None]:
    """Note in the session that draws inside the block are seeded by sample, or by a rank's part of a batch."""
    session = current_or_none()
    if session is None:
        yield
        return
    before = session.batches.set_reading(what)
    try:
        yield
    finally:
        session.batches.set_reading(before)


def owners_of_generators(dataset: object) -> list[Any]:
    """Return the objects with ``set_random_state`` in ``dataset`` and its parts, and generators that are attributes.

    Follows ``transform`` (MONAI, torchvision), ``dataset`` (``Subset``) and ``datasets`` (``ConcatDataset``). MONAI's
    ``Compose`` passes the seed on to its transforms.
    """
    owners: list[Any] = []
    seen: set[int] = set()
    waiting: list[object] = [dataset]
    while waiting:
        candidate = waiting.pop()
        if candidate is None or id(candidate) in seen:
            continue
        seen.add(id(candidate))
        if callable(getattr(candidate, "set_random_state", None)):
            owners.append(candidate)
        else:
            owners += _generators_of(candidate, seen)
        waiting.extend(getattr(candidate, name, None) for name in ("transform", "dataset"))
        inner = getattr(candidate, "datasets", ())
        waiting.extend(inner if isinstance(inner, list | tuple) else ())
    return owners


def _generators_of(candidate: object, seen: set[int]) -> list[Any]:
    found = [one for one in getattr(candidate, "__dict__", {}).values() if isinstance(one, _GENERATORS)]
    new = {id(one): one for one in found if id(one) not in seen}
    seen.update(new)
    return list(new.values())


Collate = Callable[[list[Any]], Batch]
Column: TypeAlias = "torch.Tensor | npt.NDArray[Any]"
Rebuild = Callable[[list[torch.Tensor]], Batch]
_WHOLE_STREAM = (
    "pass nodesplitter=lambda urls: urls to webdataset.WebDataset: every rank reads the whole stream, and rankwise "
    "selects each rank's part"
)


class FetchedBatch(NamedTuple):
    """The data read for a request, or from a stream."""

    stop: int
    batch: Batch
    described: str = ""
    """The comparable values of a stream's global batch; empty if it is not compared."""
    num_given: int | None = None
    """Samples of the global batch, if the dataset returned it as one."""
    dims: Mapping[str, int] | None = None
    """Which dim of each tensor in a stream's batches holds the samples, if a function of the user's makes them."""


class MapSource(Protocol):
    """A source that reads batches by index."""

    def __len__(self) -> int: ...

    def fetch(self, request: BatchRequest) -> Batch:
        """Return the batch of ``request``.

        Raises:
            DatasetError: the dataset or the collate function raised; that error is the cause.
        """
        ...


class ColumnSource:
    """Tensors and arrays whose first dim counts samples; a batch is one indexing of each."""

    def __init__(self, columns: list[Column], rebuild: Rebuild, rows: npt.NDArray[np.int64] | None) -> None:
        self.columns = columns
        self._rebuild = rebuild
        self._rows = rows

    def __len__(self) -> int:
        return len(self.columns[0]) if self._rows is None else len(self._rows)

    def fetch(self, request: BatchRequest) -> Batch:
        """Return the columns at the indices of ``request``, as new tensors."""
        indices = request.indices if self._rows is None else self._rows[request.indices]
        index = torch.from_numpy(indices)
        return self._rebuild(_rows_of(self.columns, index))


class SampleSource:
    """A map-style dataset, read sample by sample, each with generators seeded for it.

    A dataset that has ``__getitems__`` reads the whole batch through it; the generators are then seeded once, for the
    batch's first sample, so random augmentation there depends on the number of ranks.
    """

    def __init__(
        self, dataset: Any, collate: Collate, seed: int, where: str, collates: Literal["samples", "batches"] = "batches"
    ) -> None:
        self._dataset = dataset
        self._collates: Literal["samples", "batches"] = collates
        self._collate = collate
        self._seed = seed
        self._where = where
        self._owners = owners_of_generators(dataset)
        self._at_once = hasattr(innermost(dataset), "__getitems__")

    def __len__(self) -> int:
        return len(self._dataset)

    def fetch(self, request: BatchRequest) -> Batch:
        """Return the collated samples; the process's generators are restored."""
        with generators_kept(), reading(self._collates):
            if len(request.indices):
                places = request.indices.tolist()
                return self._collated(self._read(request.epoch, request.indices), places)
            (sample,) = self._read(request.epoch, np.array([request.stand_in]))
            return _of_no_samples(sample, lambda samples: self._collated(samples, [request.stand_in] * len(samples)))

    def sample(self, index: int) -> Any:
        """Return ``dataset[index]`` as epoch 0 reads it; the process's generators are restored.

        Raises:
            DatasetError: the dataset raised; that error is the cause.
        """
        with generators_kept():
            return self._read(0, np.array([index]))[0]

    def dims_of_samples(self) -> dict[str, int]:
        """Return the dim of each tensor in a batch, by its path, that grows by one with each sample."""
        with generators_kept():
            samples = self._read(0, np.array([0, len(self) - 1]))
            return _dims_of_samples(samples, self._collate, self._where)

    def _read(self, epoch: int, indices: npt.NDArray[np.int64]) -> list[Any]:
        seeds = sample_seeds(self._seed, epoch, indices).tolist()
        samples: list[Any] = []
        place: object = None
        try:
            if self._at_once:
                place = indices.tolist()
                seed_generators(seeds[0], self._owners)
                return self._dataset.__getitems__(place)
            with reading("samples"):
                for place, seed in zip(indices.tolist(), seeds, strict=True):
                    seed_generators(seed, self._owners)
                    samples.append(self._dataset[place])
        except Exception as error:
            raise _reading_failed(f"dataset[{place}]", f"evaluate dataset[{place}]", error, self._where) from error
        return samples

    def _collated(self, samples: list[Any], places: list[int]) -> Batch:
        return collated(self._collate, samples, self._where, places)


class StreamSource:
    """An iterable dataset; every rank reads all of it and keeps its part of each global batch."""

    def __init__(
        self,
        dataset: Iterable[Any],
        collate: Collate,
        shards: Shards,
        seed: int,
        where: str,
        *,
        compares: bool = False,
        finds_dims: bool = False,
    ) -> None:
        self._compares = compares
        self._finds_dims = finds_dims
        self._dataset = dataset
        self._collate = collate
        self._shards = shards
        self._seed = seed
        self._where = where

    def batches(self, epoch: int, position: int, worker: int = 0, num_workers: int = 1) -> Iterator[FetchedBatch]:
        """Yield this rank's part of every ``num_workers``-th global batch from ``position`` on.

        The stream draws from its own generators, seeded for the epoch, so that one that shuffles yields the same order
        on every rank and the training loop's generators are unaffected. The first global batch is also described, to
        be compared between ranks, and has the dims that hold the samples.

        Raises:
            DatasetError: the stream or the collate function raised; that error is the cause.
        """
        seed = epoch_seed(self._seed, epoch) % 2**32
        owners = owners_of_generators(self._dataset)
        return _with_own_generators(self._cut(position, worker, num_workers), seed, owners)

    def _cut(self, position: int, worker: int, num_workers: int) -> Iterator[FetchedBatch]:
        for number, block in enumerate(self._blocks(position)):
            position += len(block)
            if number % num_workers == worker:
                # Before the collate function, which may change the samples.
                described = describe_block(block) if self._compares and number == 0 else ""
                dims = self._dims_of([block[0], block[-1]]) if self._finds_dims and number == 0 else None
                yield FetchedBatch(position, self._part_of(block), described, dims=dims)

    def _dims_of(self, samples: list[Any]) -> dict[str, int]:
        """Return the dims that grow with a sample; none if the collate function fails on two equal samples."""
        try:
            with generators_kept():
                return _dims_of_samples(samples, self._collate, self._where)
        except Exception:  # noqa: BLE001 - the collate function is the user's
            return {}

    def _blocks(self, position: int) -> Iterator[list[Any]]:
        size = self._shards.global_batch_size
        read = 0
        try:
            items = iter(self._dataset)
            for _ in itertools.islice(items, position):
                read += 1
            while block := list(itertools.islice(items, size)):
                read += len(block)
                if len(block) == size or self._shards.remainder == "keep":
                    yield block
        except Exception as error:
            what = f"iterating the dataset after about {read} samples"
            raise _reading_failed(what, "iterate over it", error, self._where) from error

    def _part_of(self, block: list[Any]) -> Batch:
        low, high = self._shards.local_part(0, len(block))
        with reading("batches"):
            if low < high:
                return collated(self._collate, block[low:high], self._where)
            return _of_no_samples(block[0], lambda samples: collated(self._collate, samples, self._where))


def _dims_of_samples(samples: list[Any], collate: Collate, where: str) -> dict[str, int]:
    """Return the dim of each tensor in a batch, by its path, that grows by one when a sample is there twice.

    Of each of ``samples``: a dim of joined rows grows by one, too, where a sample is a single row.
    """
    own = copy.deepcopy(collate)  # It may keep samples for the next batch.
    found = [_dims_of_sample(sample, own, where) for sample in samples]
    return {path: dim for path, dim in found[0].items() if all(one.get(path) == dim for one in found)}


def _dims_of_sample(sample: Any, collate: Collate, where: str) -> dict[str, int]:
    one, two = (
        dict(tensors_in(collated(collate, [copy.deepcopy(sample) for _ in range(num)], where))) for num in (1, 2)
    )
    found: dict[str, int] = {}
    for path, tensor in one.items():
        more = two[path].shape if path in two else ()
        sizes = zip(tensor.shape, more, strict=True) if tensor.dim() == len(more) else ()
        grown = [(dim, many - few) for dim, (few, many) in enumerate(sizes) if few != many]
        if [by for _, by in grown] == [1]:
            found[path] = grown[0][0]
    return found


def _of_no_samples(sample: Any, collate: Collate) -> Batch:
    # Copies, since a collate function may change its samples.
    return without_samples(collate([copy.deepcopy(sample)]), collate([sample, copy.deepcopy(sample)]))


def is_stream(dataset: object) -> bool:
    """Return whether ``dataset`` can only be iterated, not indexed.

    Raises:
        ConfigurationError: it can be neither, or be iterated only once.
    """
    if isinstance(dataset, IterableDataset):
        return True
    is_text = isinstance(dataset, str)
    if hasattr(dataset, "__getitem__") and not is_text:
        return False
    if is_text or not isinstance(dataset, Iterable):
        raise ConfigurationError(
            f"A {type(dataset).__name__} is not a dataset"
            + (": its samples would be its characters." if is_text else ": it can neither be indexed nor iterated."),
            do="pass a map-style dataset (__getitem__ and __len__), an iterable one, tensors or arrays",
        )
    if isinstance(dataset, Iterator):
        raise ConfigurationError(
            f"A {type(dataset).__name__} can be iterated only once, but each epoch iterates it.",
            do="pass an object whose __iter__ starts from the beginning each time, like an IterableDataset",
        )
    return True


def length_of(dataset: object) -> int:
    """Return the number of samples of a dataset that can be indexed.

    Raises:
        ConfigurationError: it has none.
    """
    try:
        return len(dataset)  # type: ignore[arg-type] # that is checked here
    except TypeError as error:
        raise ConfigurationError(
            f"A {type(dataset).__name__} has no number of samples.",
            evidence=str(error),
            do="give the dataset a __len__ that returns an integer, or make it an IterableDataset",
        ) from None


def innermost(dataset: Any) -> Any:
    """Return the dataset under any number of ``torch.utils.data.Subset``."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def columns_of(dataset: object) -> ColumnSource | None:
    """Return ``dataset`` as columns, or ``None`` if its samples must be read one by one.

    Columns are: a tensor, a NumPy array, a tuple or dict of these, a ``TensorDataset``, and subsets of them.

    Raises:
        DatasetError: the columns have different lengths.
    """
    inner = innermost(dataset)
    parts: list[Any] = [inner]
    rebuild: Rebuild = itemgetter(0)
    if type(inner) is TensorDataset:
        parts, rebuild = list(inner.tensors), list
    elif type(inner) is tuple:
        parts, rebuild = list(inner), tuple
    elif isinstance(inner, dict):
        names, parts = list(inner), list(inner.values())
        rebuild = lambda tensors: dict(zip(names, tensors, strict=True))  # noqa: E731 - as the others
    if not parts or not all(map(_is_column, parts)):
        return None
    if len({len(part) for part in parts}) > 1:
        raise DatasetError(
            "The tensors of the dataset have different numbers of samples.",
            evidence="first dims: " + ", ".join(str(len(part)) for part in parts),
            do="give each of them one row per sample",
        )
    return ColumnSource(parts, rebuild, _rows_chosen(dataset))


def _is_column(part: object) -> bool:
    if isinstance(part, torch.Tensor):
        return type(part) is torch.Tensor and part.dim() > 0 and part.layout == torch.strided
    return isinstance(part, np.ndarray) and part.ndim > 0 and part.dtype.kind in "biufc"


def _rows_chosen(dataset: Any) -> npt.NDArray[np.int64] | None:
    """Return the rows of the innermost dataset that the subsets around it select."""
    rows: npt.NDArray[np.int64] | None = None
    while type(dataset) is Subset:
        chosen = np.asarray(dataset.indices, dtype=np.int64)
        rows = chosen if rows is None else chosen[rows]
        dataset = dataset.dataset
    return rows


def _rows_of(columns: list[Column], index: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for column in columns:
        if isinstance(column, torch.Tensor):
            found.append(column.index_select(0, index if column.device.type == "cpu" else index.to(column.device)))
        else:
            rows = np.asarray(column[index.numpy()])
            found.append(torch.from_numpy(rows.astype(rows.dtype.newbyteorder("="), copy=False)))
    return found


def _with_own_generators(batches: Iterator[FetchedBatch], seed: int, owners: list[Any]) -> Iterator[FetchedBatch]:
    with generators_kept():
        seed_generators(seed, owners)
        own = generator_state()
    while True:
        with generators_kept(), reading("samples"):
            set_generator_state(own)
            fetched = next(batches, None)
            own = generator_state()
        if fetched is None:
            return
        yield fetched


def _reading_failed(what: str, alone: str, error: Exception, where: str) -> DatasetError:
    # WebDataset refuses to start on several ranks without one, and advises to divide the files by rank.
    by_itself = f"fix the dataset; to debug it, {alone} in one Python process"
    do = _WHOLE_STREAM if "nodesplitter" in str(error) else by_itself
    return DatasetError(f"{what} raised {type(error).__name__}: {error}", where=where, do=do)
