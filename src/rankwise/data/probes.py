# SPDX-License-Identifier: Apache-2.0
"""Reading a few samples to compare them between ranks, where and as the loader reads them.

Knows no other rank. Samples that cannot be read or compared are left out: the user sees the dataset's own error when
the training loop reaches that sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankwise.data.batches import map_tensors
from rankwise.data.fingerprints import Leaf, digest_of, leaves_of
from rankwise.data.shards import BatchRequest
from rankwise.data.sources import ColumnSource, SampleSource, columns_of
from rankwise.data.workers import WorkerOptions, Workers
from rankwise.errors import DatasetError

if TYPE_CHECKING:
    import numpy.typing as npt

_NUM_SAMPLES = 4
"""Reading one may take long (a 3-D scan), and every construction of a loader pays for it."""
_NUM_ROWS = 256
"""Rows of tensors and arrays in memory cost microseconds."""


class Probe(NamedTuple):
    """The comparable values of one sample."""

    sample_index: int
    leaves: list[Leaf] | None
    """``None`` if it cannot be read."""


class Prober:
    """Reads samples of a loader's source in the process in which the loader would.

    If the loader has workers, a temporary worker process with their ``options`` reads: a file that the dataset opens at
    its first sample must not be open in the rank when the workers are forked from it.
    """

    def __init__(
        self,
        source: ColumnSource | SampleSource,
        options: WorkerOptions | None,
        where: str,
        stop_signals: tuple[str, ...] = (),
    ) -> None:
        self._source = source
        self._options = options
        self._where = where
        self._stop_signals = stop_signals

    def indices(self) -> list[int]:
        """Return which samples to compare: first, last, and evenly spaced ones between."""
        most = _NUM_ROWS if isinstance(self._source, ColumnSource) else _NUM_SAMPLES
        last = len(self._source) - 1
        return sorted(set(np.linspace(0, last, min(most, last + 1)).round().astype(int).tolist()))

    def read(self, indices: list[int], *, num_reads: int = 1, paths: frozenset[str] | None = None) -> list[Probe]:
        """Return the comparable values of samples, after reading each up to ``num_reads`` times.

        Values that differ between reads or have none of ``paths`` are left out. The process's generators are restored.
        """
        found = self._fetched(_Reading(self._source, num_reads, paths), indices)
        # The training loop's own workers will report it, where users look for it.
        return [Probe(index, None) for index in indices] if found is None else found

    def dims_of_samples(self) -> dict[str, int]:
        """Return the dim of each tensor in a batch that holds the samples, by the tensor's path; of no other one."""
        return self._fetched(_Growing(self._source), []) or {}

    def _fetched(self, reading: _Reading | _Growing, indices: list[int]) -> Any:
        """Return what ``reading`` fetches; ``None`` if the worker fails."""
        request = BatchRequest(0, 0, np.array(indices, dtype=np.int64), -1)
        if self._options is None:
            return reading.fetch(request)
        one = self._options._replace(num_workers=1, prefetch_factor=None, persistent_workers=False, pin_memory=False)
        try:
            (fetched,) = Workers(reading, one, self._where, self._stop_signals).read(iter([request]))
        except Exception:  # noqa: BLE001 - a worker may fail to start or to read in any way
            return None
        return fetched.batch


class _Reading:
    """A source for the workers, whose batches are probes."""

    def __init__(self, source: ColumnSource | SampleSource, num_reads: int, paths: frozenset[str] | None) -> None:
        self._source = source
        self._num_reads = num_reads
        self._paths = paths

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, request: BatchRequest) -> list[Probe]:
        return [self._probe(index) for index in request.indices.tolist()]

    def _probe(self, index: int) -> Probe:
        try:
            leaves = self._leaves(index)
            for _ in range(self._num_reads - 1):
                if not leaves:
                    break
                again = {leaf.path: leaf.digest for leaf in self._leaves(index)}
                leaves = [leaf for leaf in leaves if again.get(leaf.path) == leaf.digest]
        except Exception:  # noqa: BLE001 - a dataset may fail in any way, and does so again where users expect it
            return Probe(index, None)
        return Probe(index, leaves)

    def _leaves(self, index: int) -> list[Leaf]:
        leaves = self._all_leaves(index)
        return leaves if self._paths is None else [leaf for leaf in leaves if leaf.path in self._paths]

    def _all_leaves(self, index: int) -> list[Leaf]:
        if isinstance(self._source, SampleSource):
            return leaves_of(self._source.sample(index))
        row: npt.NDArray[np.int64] = np.array([index])
        return leaves_of(map_tensors(lambda tensor: tensor[0], self._source.fetch(BatchRequest(0, 0, row, -1))))


class _Growing:
    """A source for the workers, whose batch is what a second sample adds to a batch of one."""

    def __init__(self, source: ColumnSource | SampleSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, request: BatchRequest) -> dict[str, int]:
        """Return the dims that grow with a sample; none if a collate function fails on two equal samples."""
        del request
        try:
            return self._source.dims_of_samples() if isinstance(self._source, SampleSource) else {}
        except Exception:  # noqa: BLE001 - the dataset and the collate function are the user's
            return {}


def digest_of_probes(probes: list[Probe]) -> str:
    """Return a digest that is equal if everything in ``probes`` is."""
    return digest_of(*(leaf.digest.encode() for probe in probes for leaf in probe.leaves or ()))


def prober_in_memory(dataset: object, where: str) -> Prober | None:
    """Return a prober for rows of tensors and arrays; ``None`` for any other dataset."""
    try:
        columns = columns_of(dataset)
    except DatasetError:
        return None
    return None if columns is None else Prober(columns, None, where)
