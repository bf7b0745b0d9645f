# SPDX-License-Identifier: Apache-2.0
"""Making a batch of samples, and saying which samples could not become one.

Torch's own words for samples of different shapes name places in the batch, in a worker only a storage that cannot be
resized. Imported by ``sources``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rankwise.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_MOST_KINDS = 8
_MOST_PLACES = 8
_MOST_PARTS = 12


def collated(
    collate: Callable[[list[Any]], Any],
    samples: Any,  # noqa: ANN401 - a list, but for what __getitems__ may return
    where: str,
    places: Sequence[int] = (),
) -> Any:  # noqa: ANN401 - any batch
    """Return the batch that ``collate`` makes of ``samples``.

    Args:
        collate: the user's function, or torch's.
        samples: those of one batch.
        where: the rank, for the error.
        places: the index of each sample in the dataset; empty where it has none.

    Raises:
        DatasetError: ``collate`` raised, which is the cause; the samples are the evidence.
    """
    try:
        return collate(samples)
    except Exception as error:
        # What __getitems__ returns goes to the function as it is, and need not be a list.
        of = f"{len(samples)} samples" if isinstance(samples, list) else f"a {type(samples).__name__}"
        raise DatasetError(
            f"collate_fn of {of} raised {type(error).__name__}: {error}",
            where=where,
            evidence=_in_words(samples, places) if isinstance(samples, list) else None,
        ) from error


def _in_words(samples: list[Any], places: Sequence[int]) -> str:
    """Return a line for each kind of sample: what it is, and which are of that kind."""
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
