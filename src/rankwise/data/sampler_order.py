# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch from the user's sampler, seeded by epoch and so the same on every rank. Reads no sample.

Also which arguments cannot decide the order or the batches together.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from rankwise.data.epoch_order import epoch_seed
from rankwise.data.fingerprints import digest_of
from rankwise.data.sources import generators_kept, seed_generators
from rankwise.errors import ConfigurationError, DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

SAME_DRAWS = (
    "draw in the sampler's __iter__ from torch's, NumPy's or Python's global generator, or from a torch.Generator that "
    "is its attribute `generator`: rankwise seeds these for each epoch. Give the sampler the same weights on every rank"
)
OF_BATCHES = "batches"
"""What a state says in place of a sampler's length, if the sampler yields batches."""
_MOST_EPOCHS = 20
_LEAST_LIMIT = 2**20
"""A batch sampler that yields more indices than these is endless."""


class GivenOrder:
    """The order that a sampler yields for an epoch: the indices of all ranks together.

    A pure function of ``(seed, epoch)`` for samplers that draw from Python's, NumPy's or torch's global generator or
    from a ``torch.Generator`` that is their attribute ``generator``, as all of torch's do: these are seeded while the
    sampler is iterated, and restored. ``set_epoch`` of a sampler is called with the epoch. The indices of one epoch are
    kept, 8 bytes each.

    Args:
        sampler: has a length, and yields one index of the dataset at a time.
        num_samples: of the dataset.
        seed: of the loader.

    Raises:
        ConfigurationError: it has no length, yields batches or one rank's share, or yields nothing.
    """

    def __init__(self, sampler: Any, num_samples: int, seed: int) -> None:
        self._check(sampler)
        self._sampler = sampler
        self._num_samples = num_samples
        self._seed = seed
        self._drawn: tuple[int, npt.NDArray[np.int64]] | None = None
        self._expected: tuple[int, str] | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    @property
    def length(self) -> int | str:
        """How many indices an epoch has; :data:`OF_BATCHES` if that may differ from epoch to epoch."""
        return len(self)

    def of_epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the indices of an epoch, of all ranks together.

        Raises:
            DatasetError: they are not indices of the dataset, not as many as the sampler's length, or not those of
                the loaded state.
        """
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = (epoch, self._checked(self._draw(epoch)))
        indices = self._drawn[1]
        if self._expected is not None and self._expected[0] == epoch and self._expected[1] != _digest(indices):
            raise DatasetError(
                f"The sampler yields a different order for epoch {epoch} than when the state was saved: its position "
                "refers to other samples in this order.",
                do=SAME_DRAWS,
            )
        return indices

    def facts(self, epoch: int) -> dict[str, object]:
        """Return this order's entries of a state, JSON-able: its length, and its digest if ``epoch`` is drawn."""
        drawn = self._drawn
        digest = None if drawn is None or drawn[0] != epoch else _digest(drawn[1])
        return {"sampler_length": self.length, "sampler_digest": digest}

    def expect(self, state: Mapping[str, Any]) -> None:
        """Reject the epoch of ``state`` later unless its order is the saved one."""
        digest = state.get("sampler_digest")
        self._expected = None if digest is None else (state["epoch"], digest)

    def _check(self, sampler: Any) -> None:
        _check_kind(sampler)
        if not len(sampler):
            raise ConfigurationError(
                f"The sampler, a {type(sampler).__name__}, has a length of 0.",
                do="pass a sampler that yields at least one index",
            )

    def _draw(self, epoch: int) -> list[Any]:
        seed = epoch_seed(self._seed, epoch)
        samplers = list(_with_inner(self._sampler))
        found = [one.generator for one in samplers if isinstance(getattr(one, "generator", None), torch.Generator)]
        states = [own.get_state() for own in found]
        with generators_kept():
            seed_generators(seed % 2**32)
            for own in found:
                own.manual_seed(seed % 2**63)
            for one in samplers:
                if callable(getattr(one, "set_epoch", None)):
                    one.set_epoch(epoch)
            try:
                return self._taken(iter(self._sampler))
            except DatasetError:
                raise
            except Exception as error:
                raise DatasetError(f"Iterating the sampler raised {type(error).__name__}: {error}") from error
            finally:
                for own, state in zip(found, states, strict=True):
                    own.set_state(state)

    def _taken(self, given: Iterator[Any]) -> list[Any]:
        """Return what an iteration of the sampler yields, which may be endless."""
        length = len(self)
        taken = list(itertools.islice(given, length + 1))
        if len(taken) != length:
            num = "more" if len(taken) > length else str(len(taken))
            raise DatasetError(
                f"The sampler gave {num} indices, but its length is {length}.",
                do="make __len__ return the number of indices that an iteration yields, and __iter__ end after them",
            )
        return taken

    def _checked(self, given: list[Any]) -> npt.NDArray[np.int64]:
        try:
            indices = np.fromiter(map(operator.index, given), dtype=np.int64, count=len(given))
        except TypeError:
            wrong = next(one for one in given if not hasattr(one, "__index__"))
            raise DatasetError(
                f"The sampler must yield one index at a time, got a {type(wrong).__name__}.",
                do="pass a sampler of single indices: global_batch_size forms the batches; or pass this one as "
                "batch_sampler=",
            ) from None
        outside = np.flatnonzero((indices < 0) | (indices >= self._num_samples))
        if outside.size:
            position = int(outside[0])
            raise DatasetError(
                f"The sampler gave index {indices[position]} at position {position}, but the dataset has "
                f"{self._num_samples} samples.",
                do=f"make it yield indices from 0 to {self._num_samples - 1}",
            )
        return indices


class GivenBatches(GivenOrder):
    """The batches that a batch sampler yields for an epoch, each a global batch, of any number of samples."""

    _ends: npt.NDArray[np.int64]
    """Of the drawn epoch: the positions at which its batches end."""

    @property
    def length(self) -> str:
        """:data:`OF_BATCHES`."""
        return OF_BATCHES

    def ends_of_epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the positions at which the global batches of an epoch end; raises as :meth:`of_epoch`."""
        self.of_epoch(epoch)
        return self._ends

    def _check(self, sampler: Any) -> None:
        _check_whole(sampler, "batch_sampler")
        if not isinstance(sampler, Iterable):
            raise ConfigurationError(
                f"batch_sampler= must have __iter__, but a {type(sampler).__name__} has none.",
                do="make its iteration yield a list of indices for each global batch",
            )

    def _taken(self, given: Iterator[Any]) -> list[Any]:
        taken: list[Any] = []
        ends: list[int] = []
        most = max(_MOST_EPOCHS * self._num_samples, _LEAST_LIMIT)
        for batch in given:
            indices = list(batch) if isinstance(batch, Iterable) else []
            if not indices:
                what = "an empty batch" if isinstance(batch, Iterable) else f"a {type(batch).__name__}"
                raise DatasetError(
                    f"The batch sampler must yield a list of indices for each batch, got {what} after {len(ends)} "
                    "batches.",
                    do="leave empty batches out; pass a sampler of single indices as sampler=",
                )
            taken += indices
            ends.append(len(taken))
            if len(taken) > most:
                raise DatasetError(
                    f"The batch sampler has not ended after {len(taken)} indices of {self._num_samples} samples.",
                    do="make __iter__ end after the batches of one epoch: the next epoch iterates it again",
                )
        if not ends:
            raise DatasetError("The batch sampler yields no batch.", do="make it yield at least one list of indices")
        self._ends = np.array(ends, dtype=np.int64)
        return taken


def check_batches(dataset: object, *, is_stream: bool, is_ready: bool, batch_sampler: object, **others: object) -> None:
    """Raise if batches are formed in two ways.

    Args:
        dataset: for the error.
        is_stream: whether the dataset can only be iterated.
        is_ready: whether it returns batches.
        batch_sampler: as the loader was given it.
        others: further arguments that form batches; false ones were not given.

    Raises:
        ConfigurationError: see above.
    """
    if batch_sampler is not None and is_stream:
        raise ConfigurationError(
            f"batch_sampler= needs a dataset that can be indexed, but a {type(dataset).__name__} can only be iterated.",
            do="leave batch_sampler= out, or make the dataset map-style",
        )
    ways = ["batch_sampler="] * (batch_sampler is not None) + ["batch_size=None"] * is_ready
    ways += [f"{name}=" for name, given in others.items() if given and ways]
    if len(ways) > 1:
        raise ConfigurationError(
            f"{ways[0]} was given together with {', '.join(ways[1:])}, but it determines the batches alone.",
            do=f"pass {ways[0]} without {', '.join(ways[1:])}",
        )


def check_order(dataset: object, *, is_stream: bool, shuffle: bool, sampler: object, seed: int) -> None:
    """Raise if the order of an epoch is given twice, or wrongly, or for a dataset that can only be iterated.

    Raises:
        ConfigurationError: see above.
    """
    if isinstance(shuffle, str):
        raise ConfigurationError(f"shuffle must be True or False, got {shuffle!r}.", do="pass one of the two")
    try:
        operator.index(seed)
    except TypeError:
        raise ConfigurationError(
            f"seed must be an integer, got {seed!r}.",
            do="pass any integer, the same on every rank; for another order in each run: "
            "rankwise.broadcast_object(random.getrandbits(32))",
        ) from None
    if sampler is not None and shuffle:
        raise ConfigurationError(
            "Both shuffle=True and sampler= were given, and each decides the order of an epoch.",
            do="pass one of them",
        )
    if is_stream and sampler is not None:
        raise ConfigurationError(
            f"sampler= needs a dataset that can be indexed, but a {type(dataset).__name__} can only be iterated.",
            do="leave sampler= out, or make the dataset map-style",
        )
    if is_stream and shuffle:
        raise ConfigurationError(
            f"shuffle=True needs a dataset that can be indexed, but a {type(dataset).__name__} can only be iterated.",
            do="shuffle inside the dataset's __iter__ (its generators are seeded the same on "
            "every rank), or make the dataset map-style",
        )


def given_order(sampler: Any, batch_sampler: Any, num_samples: int, seed: int) -> GivenOrder | None:
    """Return the order of whichever of the two samplers was given; ``None`` if none was.

    Raises:
        ConfigurationError: it is no order for all ranks together.
    """
    if batch_sampler is not None:
        return GivenBatches(batch_sampler, num_samples, seed)
    return None if sampler is None else GivenOrder(sampler, num_samples, seed)


def _with_inner(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, and those that it takes its indices from."""
    seen: list[Any] = []
    while sampler is not None and not any(sampler is one for one in seen):
        seen.append(sampler)
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _check_whole(sampler: Any, keyword: str) -> None:
    """Raise if the sampler yields the indices of one rank only."""
    for one in _with_inner(sampler):
        if isinstance(one, DistributedSampler):
            raise ConfigurationError(
                f"{keyword}= takes the order for all ranks together, but a {type(one).__name__} yields one rank's "
                "share.",
                do="leave it out: rankwise selects each rank's part itself; shuffle=True gives a random order each "
                "epoch",
            )


def _check_kind(sampler: Any) -> None:
    name = type(sampler).__name__
    _check_whole(sampler, "sampler")
    if isinstance(sampler, BatchSampler):
        raise ConfigurationError(
            f"sampler= takes single indices, but a {name} yields batches.",
            do="pass it as batch_sampler=, without global_batch_size, or pass its inner sampler",
        )
    if not isinstance(sampler, Iterable) or not hasattr(sampler, "__len__"):
        raise ConfigurationError(
            f"sampler= must have __iter__ and __len__, but a {name} lacks one of them.",
            do="give it a __len__ that returns how many indices an epoch has, and let __iter__ end after them",
        )


def _digest(indices: npt.NDArray[np.int64]) -> str:
    return digest_of(np.ascontiguousarray(indices).data)
