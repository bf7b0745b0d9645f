# SPDX-License-Identifier: Apache-2.0
"""Sums of the largest numbers of every rank, which travel with their places."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rankwise.tensors.as_bytes import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Exchange


class SumOfLargest:
    """Adds up over the ranks of an exchange what each has chosen."""

    def __init__(self, exchange: Exchange, share: float, what: str) -> None:
        self._exchange = exchange
        self._what = what
        self._share = share

    def __call__(
        self, reported: torch.Tensor, given: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """See :class:`rankwise.parallel.compress.allgather_channel.CompressedSum`."""
        pieces = [reported]
        for body in given:
            places = body.abs().topk(math.ceil(self._share * len(body)), sorted=False).indices
            pieces += [bytes_of(body[places]), bytes_of(places.int())]
            body[places] = 0.0
        rows = self._exchange.all_gather(torch.cat(pieces), what=f"{self._what}: largest")
        totals = [torch.zeros_like(body) for body in given]
        for row in rows:
            _, *of_channels = row.split([len(piece) for piece in pieces])
            for total, numbers, places in zip(totals, of_channels[::2], of_channels[1::2], strict=True):
                # Copied: as they lie, bytes need not begin where a number may.
                total.index_add_(0, places.clone().view(torch.int32), numbers.clone().view(total.dtype))
        return rows[:, : len(reported)], totals
