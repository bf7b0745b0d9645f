# SPDX-License-Identifier: Apache-2.0
"""Sums of the largest numbers of every rank, which travel with their places."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rankwise.exchange.protocol import Exchange


class Largest:
    """Adds up over the ranks of an exchange what each has chosen."""

    def __init__(self, exchange: Exchange, num_elements: int, share: float, what: str) -> None:
        self._exchange = exchange
        self._what = what
        self._num_sent = math.ceil(share * num_elements)

    def __call__(self, given: torch.Tensor, _: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over ranks, and what this rank has left out."""
        places = given.abs().topk(self._num_sent, sorted=False).indices
        all_numbers = self._exchange.all_gather(given[places], what=f"{self._what}: largest")
        all_places = self._exchange.all_gather(places.int(), what=f"{self._what}: their places")
        total = torch.zeros_like(given)
        for numbers, of_rank in zip(all_numbers, all_places, strict=True):
            total.index_add_(0, of_rank, numbers)
        left = given.clone()
        left[places] = 0.0
        return total, left
