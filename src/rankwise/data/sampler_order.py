# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch from the user's sampler, seeded by epoch and so the same on every rank. Reads no sample."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from rankwise.data.fingerprints import digest_of
from rankwise.data.seeds import epoch_seed, generators_kept, seed_generators
from rankwise.errors import ConfigurationError, DatasetError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

SAME_DRAWS = (
    "draw in the sampler's __iter__ from torch's, NumPy's or Python's global generator, or from a torch.Generator that "
    "is its attribute `generator`: rankwise seeds these for each epoch. Give the sampler the same weights on every rank"
)


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

    def __init__(self, sampler: Any, num_samples: int, seed: int) -> None:  # noqa: ANN401 - any sampler
        _check_kind(sampler)
        self._sampler = sampler
        self._num_samples = num_samples
        self._seed = seed
        self._length = len(sampler)
        if not self._length:
            raise ConfigurationError(
                f"The sampler, a {type(sampler).__name__}, has a length of 0.",
                do="pass a sampler that yields at least one index",
            )
        self._drawn: tuple[int, npt.NDArray[np.int64]] | None = None
        self._expected: tuple[int, str] | None = None

    def __len__(self) -> int:
        return self._length

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
        return {"sampler_length": self._length, "sampler_digest": digest}

    def expect(self, state: Mapping[str, Any]) -> None:
        """Reject the epoch of ``state`` later unless its order is the saved one."""
        digest = state.get("sampler_digest")
        self._expected = None if digest is None else (state["epoch"], digest)

    def _draw(self, epoch: int) -> list[Any]:
        seed = epoch_seed(self._seed, epoch)
        own = getattr(self._sampler, "generator", None)
        own_state = own.get_state() if isinstance(own, torch.Generator) else None
        with generators_kept():
            seed_generators(seed % 2**32)
            if isinstance(own, torch.Generator):
                own.manual_seed(seed % 2**63)
            if callable(getattr(self._sampler, "set_epoch", None)):
                self._sampler.set_epoch(epoch)
            try:
                return list(self._sampler)
            except Exception as error:
                raise DatasetError(f"Iterating the sampler raised {type(error).__name__}: {error}") from error
            finally:
                if isinstance(own, torch.Generator) and own_state is not None:
                    own.set_state(own_state)

    def _checked(self, given: list[Any]) -> npt.NDArray[np.int64]:
        if len(given) != self._length:
            raise DatasetError(
                f"The sampler gave {len(given)} indices, but its length is {self._length}.",
                do="make __len__ return the number of indices that an iteration yields",
            )
        try:
            indices = np.fromiter(map(operator.index, given), dtype=np.int64, count=len(given))
        except TypeError:
            wrong = next(one for one in given if not hasattr(one, "__index__"))
            raise DatasetError(
                f"The sampler must yield one index at a time, got a {type(wrong).__name__}.",
                do="pass a sampler of single indices: global_batch_size forms the batches",
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


def _check_kind(sampler: Any) -> None:  # noqa: ANN401 - any sampler
    name = type(sampler).__name__
    if isinstance(sampler, DistributedSampler):
        raise ConfigurationError(
            f"sampler= takes the order for all ranks together, but a {name} yields one rank's share.",
            do="leave it out: rankwise selects each rank's part itself; shuffle=True gives a random order each epoch",
        )
    if isinstance(sampler, BatchSampler):
        raise ConfigurationError(
            f"sampler= takes single indices, but a {name} yields batches.",
            do="pass its inner sampler: global_batch_size forms the batches",
        )
    if not isinstance(sampler, Iterable) or not hasattr(sampler, "__len__"):
        raise ConfigurationError(
            f"sampler= must have __iter__ and __len__, but a {name} lacks one of them.",
            do="give it a __len__ that returns how many indices an epoch has",
        )


def _digest(indices: npt.NDArray[np.int64]) -> str:
    return digest_of(np.ascontiguousarray(indices).data)
