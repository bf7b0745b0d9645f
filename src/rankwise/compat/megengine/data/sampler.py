# SPDX-License-Identifier: Apache-2.0
"""Samplers that give each rank its part of a dataset, in MegEngine's order, for ``DataLoader(sampler=)``.

They also work as ``batch_sampler=`` of torch's loader. Every rank gets the same number of samples: if they do not
divide evenly, the first ones of the order are repeated. ``rankwise.DataLoader`` gives every sample once instead.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np

from rankwise.compat.megengine.distributed.groups import get_rank, get_world_size
from rankwise.errors import ConfigurationError


class Sized(Protocol):
    """An object with a length."""

    def __len__(self) -> int: ...


class Sampler(ABC):
    """Yields batches of indices."""

    @abstractmethod
    def __iter__(self) -> Iterator[list[Any]]: ...


class MapSampler(Sampler):
    """Batches of indices for a dataset with a length; :meth:`sample` determines their order.

    Args:
        dataset: only its length is used.
        batch_size: samples of one batch, on each rank.
        drop_last: whether to drop a last batch that is not full.
        num_samples: of one epoch, over all ranks; default: the dataset's.
        world_size: default: of the joined world, or 1.
        rank: default: in the joined world, or 0.
        seed: of the order, the same on every rank; default: 0 on several ranks, random on one. Each epoch of a sampler
            has another order.

    Raises:
        ConfigurationError: a number is invalid, or there is less than one batch per rank.
    """

    def __init__(  # noqa: PLR0917 - as MegEngine has it
        self,
        dataset: Sized,
        batch_size: int = 1,
        drop_last: bool = False,  # noqa: FBT001, FBT002 - as MegEngine has it
        num_samples: int | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        seed: int | None = None,
    ) -> None:
        _check_positive("batch_size", batch_size)
        if not isinstance(drop_last, bool):
            raise ConfigurationError(f"drop_last must be True or False, got {drop_last!r}.", do="pass True or False")
        if num_samples is not None:
            _check_positive("num_samples", num_samples)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.world_size = get_world_size() if world_size is None else world_size
        self.rank = get_rank() if rank is None else rank
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(
                f"rank={self.rank} is invalid for world_size={self.world_size}.", do="pass both, or neither"
            )
        total = len(dataset) if num_samples is None else num_samples
        self.num_samples = math.ceil(total / self.world_size)
        if self.num_samples < batch_size:
            raise ConfigurationError(
                f"{total} samples on {self.world_size} ranks are fewer than one batch of {batch_size} per rank.",
                do="pass a smaller batch_size",
            )
        if seed is None and self.world_size > 1:
            seed = 0
        # MegEngine uses this generator of NumPy: a seed gives the same order.
        self.rng = np.random.RandomState(seed)

    def __iter__(self) -> Iterator[list[Any]]:
        return self.batch()

    def __len__(self) -> int:
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def sample(self) -> Iterable[Any]:
        """Return the indices of an epoch, of all ranks."""
        raise NotImplementedError

    def scatter(self, indices: list[Any]) -> list[Any]:
        """Return this rank's part: every ``world_size``-th index, from ``rank`` on.

        Raises:
            ConfigurationError: the number of indices is not the number of samples.
        """
        total = self.num_samples * self.world_size
        whole = [*indices, *indices[: max(total - len(indices), 0)]]
        if len(whole) != total:
            raise ConfigurationError(
                f"{len(indices)} indices do not match {total} samples.",
                evidence=f"the dataset has {len(self.dataset)}",
                do="pass a torch.utils.data.Subset(dataset, indices) instead of indices=",
            )
        return whole[self.rank :: self.world_size]

    def batch(self) -> Iterator[list[Any]]:
        """Yield this rank's batches of one epoch."""
        indices = list(self.sample())
        if self.world_size > 1:
            indices = self.scatter(indices)
        for start in range(0, len(indices), self.batch_size):
            batch = indices[start : start + self.batch_size]
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch


class SequentialSampler(MapSampler):
    """The samples in the dataset's order. Arguments as for :class:`MapSampler`, and ``indices``.

    ``indices`` replaces the numbers from 0 to the length of the dataset; on several ranks it must have that length.
    """

    def __init__(  # noqa: PLR0917 - as MegEngine has it
        self,
        dataset: Sized,
        batch_size: int = 1,
        drop_last: bool = False,  # noqa: FBT001, FBT002 - as MegEngine has it
        indices: Sequence[Any] | None = None,
        world_size: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(dataset, batch_size, drop_last, None, world_size, rank)
        self.indices = _checked_indices(indices)

    def sample(self) -> Iterable[Any]:
        """Return the indices of an epoch, of all ranks."""
        return range(len(self.dataset)) if self.indices is None else self.indices


class RandomSampler(MapSampler):
    """The samples in a new order in each epoch. Arguments as for :class:`SequentialSampler`, and ``seed``."""

    def __init__(  # noqa: PLR0917 - as MegEngine has it
        self,
        dataset: Sized,
        batch_size: int = 1,
        drop_last: bool = False,  # noqa: FBT001, FBT002 - as MegEngine has it
        indices: Sequence[Any] | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(dataset, batch_size, drop_last, None, world_size, rank, seed)
        self.indices = _checked_indices(indices)

    def sample(self) -> Iterable[Any]:
        """Return the indices of an epoch, of all ranks."""
        # NumPy shuffles a length and a list differently, so the length cannot be replaced by a list of numbers.
        chosen = len(self.dataset) if self.indices is None else self.indices
        return self.rng.permutation(chosen).tolist()


class ReplacementSampler(MapSampler):
    """Samples drawn at random, with replacement. Arguments as for :class:`MapSampler`, and ``weights``.

    ``weights`` are the relative frequencies of the samples; default: all equal.
    """

    def __init__(  # noqa: PLR0917 - as MegEngine has it
        self,
        dataset: Sized,
        batch_size: int = 1,
        drop_last: bool = False,  # noqa: FBT001, FBT002 - as MegEngine has it
        num_samples: int | None = None,
        weights: Sequence[float] | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(dataset, batch_size, drop_last, num_samples, world_size, rank, seed)
        if weights is not None and len(weights) != len(dataset):
            raise ConfigurationError(
                f"Got {len(weights)} weights for {len(dataset)} samples.", do="pass one weight for each sample"
            )
        self.weights = None if weights is None else np.asarray(weights, dtype=float) / sum(weights)

    def sample(self) -> Iterable[Any]:
        """Return the indices of an epoch, of all ranks."""
        size = self.num_samples * self.world_size
        return self.rng.choice(len(self.dataset), size=size, replace=True, p=self.weights).tolist()


class StreamSampler(Sampler):
    """The batch size for a ``StreamDataset``. Like MegEngine's, it does not shard.

    Each rank reads all samples of its dataset's ``__iter__``, which can depend on ``dist.get_rank()``.
    ``rankwise.DataLoader`` gives each rank its own samples of an iterable dataset.

    Args:
        batch_size: samples of one batch, on each rank.

    Raises:
        ConfigurationError: ``batch_size`` is not a positive integer.
    """

    def __init__(self, batch_size: int = 1) -> None:
        _check_positive("batch_size", batch_size)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[Any]]:
        for start in count(0, self.batch_size):
            yield [*range(start, start + self.batch_size)]


class Infinite(Sampler):
    """Batches of another sampler, repeated without end."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._batches = iter(sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __len__(self) -> int:
        return sys.maxsize

    def __next__(self) -> list[Any]:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.sampler)
            batch = next(self._batches)
        return batch


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigurationError(f"{name}={value!r} is invalid: it must be at least 1.", do=f"pass {name}=1 or more")


def _checked_indices(indices: object) -> Sequence[Any] | None:
    if indices is not None and not isinstance(indices, Sequence):
        raise ConfigurationError(
            f"indices must be a list, not {type(indices).__name__}.", do="pass a list: list(indices), indices.tolist()"
        )
    return indices
