# SPDX-License-Identifier: Apache-2.0
"""``megengine.data.dataloader``: MegEngine's loader, on the workers of torch's, and how it makes batches of samples."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
import torch.utils.data

from rankwise.compat.megengine.data.dataset import StreamDataset
from rankwise.compat.megengine.data.sampler import Infinite, MapSampler, Sampler, SequentialSampler, StreamSampler
from rankwise.compat.megengine.data.transform import PseudoTransform, Transform
from rankwise.compat.megengine.tensors import tensor
from rankwise.errors import ConfigurationError

OBJECT_KINDS = "OSUaV"
"""NumPy's letters for dtypes that are not numbers."""


class Collator:
    """Makes a batch from samples; the default of ``DataLoader(collator=)``."""

    def apply(self, inputs: Sequence[Any]) -> Any:
        """Return the samples as one batch.

        Args:
            inputs: samples of one kind: arrays or tensors of one shape, numbers, strings, or dicts, tuples and lists of
                these.

        Returns:
            Arrays and tensors stacked [batch, ...], numbers as an array [batch], strings unchanged; for dicts and named
            tuples one of batches, for other tuples and lists a list of batches.

        Raises:
            ConfigurationError: a sample contains something else.
        """
        first = inputs[0]
        if isinstance(first, str | bytes):
            return inputs
        if isinstance(first, torch.Tensor):
            return torch.stack([*inputs])
        if isinstance(first, np.ndarray | np.generic | int | float):
            return _stacked(inputs)
        if isinstance(first, Mapping):
            return {key: self.apply([one[key] for one in inputs]) for key in first}
        if isinstance(first, Sequence):
            columns = [self.apply(column) for column in zip(*inputs, strict=True)]
            return type(first)(*columns) if hasattr(first, "_fields") else columns
        raise _cannot(type(first).__name__)


def _stacked(inputs: Sequence[Any]) -> np.ndarray[Any, Any]:
    arrays = [np.asarray(one) for one in inputs]
    if arrays[0].dtype.kind in OBJECT_KINDS:
        raise _cannot(f"an array of {arrays[0].dtype}")
    return np.stack(arrays)


def _cannot(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"Cannot make a batch from samples with {what}.",
        do="return arrays, tensors, numbers, strings, or dicts, tuples and lists of these; or pass a collator= "
        "of your own with an apply(inputs) to DataLoader",
    )


class DataLoader:
    """Batches of a dataset as NumPy arrays: read, transformed and collated, in worker processes or in this one.

    The sampler decides which samples a rank gets: those for datasets with a length shard them.

    Args:
        dataset: with ``__getitem__`` and ``__len__``, or a ``StreamDataset``.
        sampler: of this dataset; default: all samples in order, each a batch. A ``StreamSampler`` for a stream.
        transform: has ``apply_batch(samples)``; for a stream, ``apply(sample)``.
        collator: has ``apply(samples)``, which returns the batch.
        num_workers: processes that read ahead; 0: this process reads.
        timeout: seconds to wait for a batch of the workers; 0: no limit.
        preload: whether to convert arrays to tensors on this rank's device.
        parallel_stream: must be false: with workers, each reads the whole stream and keeps its share of the batches.

    Raises:
        ConfigurationError: the sampler does not match the kind of dataset, or a number is negative.
    """

    def __init__(  # noqa: PLR0917 - as MegEngine has it
        self,
        dataset: Any,
        sampler: Sampler | None = None,
        transform: Transform | None = None,
        collator: Collator | None = None,
        num_workers: int = 0,
        timeout: int = 0,
        preload: bool = False,  # noqa: FBT001, FBT002 - as MegEngine has it
        parallel_stream: bool = False,  # noqa: FBT001, FBT002 - as MegEngine has it
    ) -> None:
        for name, number in (("num_workers", num_workers), ("timeout", timeout)):
            if number < 0:
                raise ConfigurationError(f"{name} must be >= 0, got {number}.", do=f"pass {name}=0 or more")
        if parallel_stream:
            raise ConfigurationError(
                "parallel_stream=True is not offered here.",
                do="omit it; to read the stream in parallel, use rankwise.DataLoader and divide it in __iter__ by "
                "torch.utils.data.get_worker_info()",
            )
        is_stream = isinstance(dataset, StreamDataset)
        if sampler is None:
            sampler = StreamSampler() if is_stream else SequentialSampler(dataset)
        _check_kind(sampler, is_stream=is_stream)
        self.dataset = dataset
        self.sampler = sampler
        self.transform = transform or PseudoTransform()
        self.collator = collator or Collator()
        self.num_workers = num_workers
        self.timeout = timeout
        self.preload = preload
        options: dict[str, Any] = {"num_workers": num_workers}
        if num_workers:
            # As in rankwise.DataLoader: a forked worker does not need a dataset that can be pickled.
            start = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
            options |= {"timeout": timeout, "multiprocessing_context": start}
        options["collate_fn"] = partial(_batch, self.transform, self.collator, is_stream=is_stream)
        if is_stream:
            batches = _SampleStream(dataset, cast("StreamSampler", sampler).batch_size)
            self._loader = torch.utils.data.DataLoader(batches, batch_size=None, **options)
        else:
            self._loader = torch.utils.data.DataLoader(dataset, batch_sampler=cast("Any", sampler), **options)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield _on_device(batch) if self.preload else batch

    def __len__(self) -> int:
        return len(cast("MapSampler", self.sampler))


def _batch(transform: Transform, collator: Collator, samples: list[Any], *, is_stream: bool) -> Any:
    """Make a batch from samples, in the process that read them."""
    if is_stream:
        return collator.apply([transform.apply(one) for one in samples])
    return collator.apply(transform.apply_batch(samples))


class _SampleStream(torch.utils.data.IterableDataset[list[Any]]):
    """The samples of a stream in lists of the size of a batch. The last may be shorter."""

    def __init__(self, dataset: StreamDataset, batch_size: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[list[Any]]:
        worker = torch.utils.data.get_worker_info()
        own, num = (0, 1) if worker is None else (worker.id, worker.num_workers)
        samples = iter(self._dataset)
        number = 0
        while batch := [*islice(samples, self._batch_size)]:
            # torch takes batches from its workers in turn, so that they are in the order of the stream.
            if number % num == own:
                yield batch
            number += 1


def _check_kind(sampler: object, *, is_stream: bool) -> None:
    if is_stream == isinstance(sampler, StreamSampler) and (is_stream or isinstance(sampler, MapSampler | Infinite)):
        return
    raise ConfigurationError(
        f"DataLoader was given a {type(sampler).__name__} for a dataset {'without' if is_stream else 'with'} a length.",
        do="pass a StreamSampler for a StreamDataset, and for other datasets a SequentialSampler, a RandomSampler or "
        "a MapSampler of your own",
    )


def _on_device(batch: Any) -> Any:
    if isinstance(batch, np.ndarray | torch.Tensor):
        return tensor(batch)
    if isinstance(batch, Mapping):
        return {key: _on_device(value) for key, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        parts = [_on_device(one) for one in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else parts
    return batch
