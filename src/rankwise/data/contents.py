# SPDX-License-Identifier: Apache-2.0
"""What a dataset says of all its samples without reading one: the indices of subsets, the names of files.

Values only: reads no sample, communicates with nobody. Imported by ``same_data``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Subset

from rankwise.data.leaves import digest_of

_MOST_LISTS = 8
_PAIR = 2


class Listing(NamedTuple):
    """One entry per sample of a dataset, in its order, that every rank must hold alike."""

    label: str
    """Where it was found: ``dataset.indices``, ``dataset.samples``."""
    entries: npt.NDArray[np.int64] | list[str]

    def digest(self, start: int = 0, stop: int | None = None) -> str:
        """Return a digest of the entries from ``start`` to before ``stop``."""
        part = self.entries[start:stop]
        if isinstance(part, np.ndarray):
            return digest_of(np.ascontiguousarray(part).data)
        return digest_of("\0".join(part).encode(errors="surrogateescape"))


def listings_of(dataset: object) -> list[Listing]:
    """Return what lists the samples of ``dataset``.

    The indices of ``Subset``, those of several around each other as one; of the dataset inside, each list as long as
    it whose items name files, as ImageFolder's ``samples`` and the dicts that MONAI's datasets are made of. The folder
    that holds all of the files is left out of the names: hosts may keep the same files in different places.
    """
    found: list[Listing] = []
    label = "dataset"
    rows: npt.NDArray[np.int64] | None = None
    while type(dataset) is Subset:
        chosen = np.asarray(dataset.indices)
        if chosen.dtype.kind not in "iu":
            return []
        rows = chosen.astype(np.int64) if rows is None else chosen[rows].astype(np.int64)
        dataset, label = dataset.dataset, f"{label}.dataset"
    if rows is not None:
        found.append(Listing("dataset.indices", rows))
    for name, items in _lists_in(dataset):
        names = _names(items if rows is None else [items[row] for row in rows.tolist()])
        if names is not None:
            found.append(Listing(f"{label}.{name}" if name else label, names))
    return found


def _lists_in(dataset: Any) -> list[tuple[str, Sequence[object]]]:  # noqa: ANN401 - any dataset
    """Return the attributes of ``dataset`` that are lists with one item per sample, or the dataset if it is a list."""
    if type(dataset) is list:
        return [("", dataset)]
    found: dict[int, tuple[str, Sequence[object]]] = {}
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if type(value) in (list, tuple) and len(value) == len(dataset):
            found.setdefault(id(value), (name, value))
    return list(found.values())[:_MOST_LISTS]


def _names(items: Sequence[object]) -> list[str] | None:
    """Return a text of one or more lines per item, or ``None`` where the items do not name files."""
    parts = _parts(items[0]) if items else None
    if parts is None or not any(isinstance(part, str) for part in parts):
        return None
    texts: list[str] = []
    for item in items:
        # What ImageFolder lists, a million times for ImageNet.
        if type(item) is tuple and len(item) == _PAIR and type(item[0]) is str and type(item[1]) is int:
            texts.append(f"{item[0]}\n{item[1]}")
            continue
        parts = _parts(item)
        if parts is None:
            return None
        texts.append("\n".join(map(str, parts)))
    # The folder that the least and the greatest are in, all are in.
    folders = [text.partition("\n")[0].rpartition("/")[0] for text in (min(texts), max(texts))]
    if not all(folder.startswith("/") for folder in folders):
        return texts
    folder = os.path.commonpath(folders)
    return texts if folder == "/" else [text.replace(f"{folder}/", "") for text in texts]


def _parts(item: object) -> list[str | float] | None:
    """Return the texts and numbers of an item, or ``None`` where it holds anything else."""
    if isinstance(item, str | os.PathLike):
        return [os.fsdecode(os.fspath(item))]
    if isinstance(item, bool | int | float):
        return [item]
    if isinstance(item, Mapping):
        item = list(item.values())
    if not isinstance(item, tuple | list):
        return None
    parts: list[str | float] = []
    for one in item:
        inner = _parts(one)
        if inner is None:
            return None
        parts += inner
    return parts
