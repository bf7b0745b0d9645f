# SPDX-License-Identifier: Apache-2.0
"""``megengine.data.dataset``: the base classes of datasets, and arrays as a dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

from rankwise.compat.megengine.alias import refusing
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ArrayDataset", "Dataset", "MapDataset", "StreamDataset"]


class Dataset(ABC):  # noqa: B024 - as MegEngine has it: what a dataset offers depends on its kind
    """Base class of datasets: a subclass has ``__getitem__`` and ``__len__``, or is a :class:`StreamDataset`."""


class MapDataset(Dataset):
    """A dataset whose samples are numbered from 0 to its length."""

    @abstractmethod
    def __getitem__(self, index: int) -> Any: ...

    @abstractmethod
    def __len__(self) -> int: ...


class StreamDataset(Dataset):
    """A dataset that can only be iterated. ``__iter__`` decides which samples a rank reads: see ``StreamSampler``."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    def __getitem__(self, index: object) -> NoReturn:
        raise ConfigurationError("A StreamDataset cannot be indexed.", do="iterate it, or use a MapDataset")

    def __len__(self) -> int:
        # A TypeError, since list(dataset) asks for the length as a hint.
        raise TypeError("A StreamDataset has no length: iterate it, or use a MapDataset")


class ArrayDataset(MapDataset):
    """Arrays of equal length; a sample is a tuple of one row of each.

    Args:
        arrays: one or several of equal length: [samples, ...] each.

    Raises:
        ConfigurationError: there are none, or their lengths differ.
    """

    def __init__(self, *arrays: Any) -> None:
        lengths = [len(array) for array in arrays]
        if len({*lengths}) != 1:
            raise ConfigurationError(
                "ArrayDataset requires one or more arrays of the same length.",
                evidence=f"it was given lengths {lengths}",
                do="pass arrays whose first dimensions are equal",
            )
        self.arrays = arrays

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(array[index] for array in self.arrays)

    def __len__(self) -> int:
        return len(self.arrays[0])


def _instead(name: str) -> str | None:
    is_named = not name.startswith("__") and name != "vision"
    return f"torchvision.datasets.{name}, or ArrayDataset of the arrays" if is_named else None


__getattr__ = refusing("megengine.data.dataset", __all__, _instead)
