# SPDX-License-Identifier: Apache-2.0
"""Datasets that are small enough to check every batch of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankwise.data.loader import DataLoader


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    return [item for part in parts for item in part]


class Squares(Dataset[dict[str, Any]]):
    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"i": index, "square": torch.tensor([float(index**2)]), "name": str(index)}


class Counting(IterableDataset[torch.Tensor]):
    def __init__(self, length: int = 20) -> None:
        self.length = length
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.length):
            self.read += 1
            yield torch.tensor(number)


def flat(loader: DataLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]
