# SPDX-License-Identifier: Apache-2.0
"""Batches: trees of tensors. How to collate one from samples, or from none, to move one, and to pin one.

A failing collate function is reported with the samples that it could not batch: torch names only positions in the
batch, and in a worker a storage that cannot be resized. Knows nothing of datasets, orders or ranks. Imported by
``sources`` and ``loader``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rankwise.errors import DatasetError
from rankwise.world.device.streams import current_stream, new_stream, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


Batch = Any
"""A tensor, or lists, tuples and dicts of them; other leaves stay as they are."""
_MOST_KINDS = 8
_MOST_PLACES = 8
_MOST_PARTS = 12


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Batch:
    """Return ``batch`` with every tensor replaced by ``change(tensor)``, in the same containers."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if type(batch) in (list, tuple):
        return type(batch)(map_tensors(change, item) for item in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(change, item) for item in batch))
    if isinstance(batch, Mapping) and not hasattr(batch, "to"):
        return _like_mapping(batch, {key: map_tensors(change, item) for key, item in batch.items()})
    return batch


def move(batch: Batch, device: torch.device, *, non_blocking: bool = False) -> Batch:
    """Return ``batch`` on ``device``; an object of another type moves by its own ``to(device)``."""
    if not isinstance(batch, torch.Tensor | list | tuple) and hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, list | tuple | Mapping | torch.Tensor):
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), batch)
    return batch


def pin(batch: Batch) -> Batch:
    """Return ``batch`` in page-locked memory, from which a GPU copies while the CPU continues."""
    return map_tensors(lambda tensor: tensor.pin_memory(), batch)


def without_samples(one: Batch, two: Batch) -> Batch:
    """Return a batch of no samples, with the dtypes and the other dims of real ones.

    ``one`` is the batch of a sample, and ``two`` of the same sample twice. Anything that grows from ``one`` to ``two``
    counts samples: any dim of a tensor, or a list or tuple. The rest is kept.
    """
    if isinstance(one, torch.Tensor):
        grown = [dim for dim in range(one.dim()) if one.shape[dim] != two.shape[dim]]
        return one.narrow(grown[0], 0, 0) if grown else one
    if isinstance(one, Mapping):
        return _like_mapping(one, {key: without_samples(item, two[key]) for key, item in one.items()})
    if not isinstance(one, list | tuple):
        return one
    if len(one) != len(two):
        return type(one)()
    items = [without_samples(a, b) for a, b in zip(one, two, strict=True)]
    return type(one)(*items) if hasattr(one, "_fields") else type(one)(items)


class ReadyBatch(NamedTuple):
    """A rank's part of a batch that the dataset returned whole."""

    part: Batch
    num_samples: int
    """Of the whole batch."""


def divided(batch: Batch, part_of: Callable[[int, int], tuple[int, int]], where: str) -> ReadyBatch:
    """Return the rows ``part_of(0, rows)`` of every tensor and list of a batch; numbers and texts are kept whole.

    Raises:
        DatasetError: it holds tensors or lists with different numbers of rows, none, or something else.
    """
    rows = set(_numbers_of_rows(batch))
    num_samples = rows.pop() if len(rows) == 1 else None
    if num_samples is None:
        raise DatasetError(
            "The dataset returned a batch that cannot be divided among the ranks: its tensors and lists do not all "
            "have one row per sample.",
            where=where,
            evidence=_kind(batch),
            do="let the dataset return samples, and pass batch_sampler= or global_batch_size=, with a collate_fn= that "
            "makes batches of them",
        )
    low, high = part_of(0, num_samples)
    return ReadyBatch(_rows(batch, slice(low, high)), num_samples)


def _numbers_of_rows(batch: Batch) -> list[int | None]:
    """Return the number of rows of each tensor and list in a batch; ``None`` for what has none."""
    if isinstance(batch, torch.Tensor):
        return [batch.shape[0]] if batch.dim() else []
    if isinstance(batch, Mapping):
        return [num for item in batch.values() for num in _numbers_of_rows(item)]
    if isinstance(batch, list | tuple):
        if _is_column(batch):
            return [len(batch)]
        return [num for item in batch for num in _numbers_of_rows(item)]
    return [] if batch is None or isinstance(batch, str | bytes | int | float) else [None]


def _is_column(batch: Sequence[Any]) -> bool:
    """Return whether a list holds one text or number per sample, and is no container of tensors."""
    return bool(batch) and all(isinstance(item, str | bytes | int | float) for item in batch)


def _rows(batch: Batch, rows: slice) -> Batch:
    if isinstance(batch, torch.Tensor):
        return batch[rows] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return _like_mapping(batch, {key: _rows(item, rows) for key, item in batch.items()})
    if not isinstance(batch, list | tuple):
        return batch
    if _is_column(batch):
        return batch[rows]
    items = [_rows(item, rows) for item in batch]
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)


def _like_mapping(kind: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    if type(kind) is dict:
        return items
    try:
        return type(kind)(items)  # type: ignore[call-arg] # a mapping that cannot be built from a dict becomes a dict
    except TypeError:
        return items


def to_device(batches: Iterator[tuple[Any, Batch]], device: torch.device) -> Iterator[tuple[Any, Batch]]:
    """Yield each ``(mark, batch)``, the batch on ``device``; if it has streams, the next one is copied meanwhile."""
    stream = new_stream(device)
    if stream is not None:
        yield from _ahead(batches, device, stream)
    else:
        for mark, batch in batches:
            yield mark, move(batch, device)


def _ahead(
    batches: Iterator[tuple[Any, Batch]], device: torch.device, stream: torch.Stream
) -> Iterator[tuple[Any, Batch]]:
    """Copy one batch ahead, on its own stream: the copy overlaps with the step before it."""
    waiting: tuple[Any, Batch, torch.Event] | None = None
    for mark, batch in batches:
        with stream:
            moved = move(batch, device, non_blocking=True)
            copied = recorded(stream)
        if waiting is not None:
            yield _handed_over(waiting, device)
        waiting = (mark, moved, copied)
    if waiting is not None:
        yield _handed_over(waiting, device)


def _handed_over(waiting: tuple[Any, Batch, torch.Event], device: torch.device) -> tuple[Any, Batch]:
    mark, batch, copied = waiting
    consumer = current_stream(device)
    consumer.wait_event(copied)

    def keep_until_used(tensor: torch.Tensor) -> torch.Tensor:
        # Without this the memory is reused as soon as the copying stream has finished with it.
        tensor.record_stream(consumer)
        return tensor

    return mark, map_tensors(keep_until_used, batch)


def collated(
    collate: Callable[[list[Any]], Any],
    samples: Any,  # a list, but for what __getitems__ may return
    where: str,
    places: Sequence[int] = (),
) -> Any:
    """Return the batch that ``collate`` returns for ``samples``, which are at ``places`` in the dataset, if anywhere.

    Raises:
        DatasetError: ``collate`` raised; that is the cause, and the samples are the evidence.
    """
    try:
        return collate(samples)
    except Exception as error:
        # The result of __getitems__ is passed to the function as it is, and need not be a list.
        of = f"{len(samples)} samples" if isinstance(samples, list) else f"a {type(samples).__name__}"
        raise DatasetError(
            f"collate_fn of {of} raised {type(error).__name__}: {error}",
            where=where,
            evidence=_describe_samples(samples, places) if isinstance(samples, list) else None,
            do="return samples of one kind and shape from the dataset (pad or crop them), "
            "or pass a collate_fn= that takes these",
        ) from error


def _describe_samples(samples: list[Any], places: Sequence[int]) -> str:
    """Return a line for each kind of sample: its description, and which samples are of that kind."""
    is_indexed = len(places) == len(samples)
    of_kind: dict[str, list[str]] = {}
    for number, sample in enumerate(samples):
        place = f"dataset[{places[number]}]" if is_indexed else f"sample {number} of the batch"
        of_kind.setdefault(_kind(sample), []).append(place)
    lines = [f"{_some(found, _MOST_PLACES)}: {kind}" for kind, found in of_kind.items()]
    more = [f"and {len(lines) - _MOST_KINDS} more kinds"] if len(lines) > _MOST_KINDS else []
    return "\n".join(lines[:_MOST_KINDS] + more)


def _kind(value: object) -> str:
    """Return a sample by type, dtype and shape, as ``(float32[3, 32, 32], int)``."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)} of NumPy"
    if isinstance(value, dict):
        entries: Mapping[Any, Any] = value
        return f"{{{_some([f'{key!r}: {_kind(part)}' for key, part in entries.items()], _MOST_PARTS)}}}"
    if isinstance(value, tuple | list):
        parts: Sequence[Any] = value
        inside = _some([_kind(part) for part in parts[: _MOST_PARTS + 1]], _MOST_PARTS, num=len(parts))
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    return "None" if value is None else type(value).__name__


def _some(words: Sequence[str], most: int, *, num: int | None = None) -> str:
    left_out = (len(words) if num is None else num) - most
    return ", ".join(words[:most]) + (f" and {left_out} more" if left_out > 0 else "")
