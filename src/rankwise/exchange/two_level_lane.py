# SPDX-License-Identifier: Apache-2.0
"""A lane for gradients of ranks on several hosts: added up within each host first, then across them.

Each of the first ranks of a host adds up one slice of the bodies of its host, reduces it with the owners of the same
slice on the other hosts, all slices at once, and every rank copies all slices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.exchange.engine import Until
from rankwise.exchange.reducing import weighted_sum_into
from rankwise.exchange.shared_lane import HEADER, SharedLane

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from rankwise.exchange.across import Across
    from rankwise.exchange.engine import Awaited, Engine
    from rankwise.exchange.mapping import Mapping
    from rankwise.exchange.shared_lane import Layout


class TwoLevelLane(SharedLane):
    """One bucket's way through the memory of each host, and between hosts."""

    def __init__(
        self,
        layout: Layout,
        mapping: Mapping,
        rank: int,
        engine: Engine,
        *,
        what: str,
        channel: int,
        across: Across,
        world_size: int,
    ) -> None:
        super().__init__(layout, mapping, rank, engine, what=what, channel=channel)
        self._across = across
        self._world_size = world_size
        self._tail = mapping.tensor(layout.tail, [1 + layout.size.num_flags], torch.float64)
        self._turn = 0

    def factor(self, share: float) -> float:
        """Divide by the number of all ranks on the way in."""
        return share / self._world_size

    def start(self, share: float, weight: float, absent: Sequence[int]) -> None:
        """Publish the body, and go on as far as it goes without waiting."""
        self._turn = self._across.take_turn()
        super().start(share, weight, absent)

    def _add_up(self, round_: int) -> Generator[Awaited]:
        headers = [HEADER.unpack_from(header) for header in self._headers]
        if self._own_slices:
            own = self._sums[self._rank]
            weighted_sum_into(own, self._own_slices, [1.0 if share else 0.0 for share, _, _ in headers])
            sent = [own]
            if self._rank == 0:
                self._tail[0] = sum(weight for _, weight, _ in headers)
                if self._all_flags:
                    self._tail[1:] = torch.frombuffer(bytearray(self._flags_of_host()), dtype=torch.uint8)
                sent.append(self._tail)
            yield from self._across.all_reduce_(self._turn, sent)
        self._reduced.post(round_)
        yield Until(self._reduced, round_)
        self._total = self._tail[0].item()
        self._flags = (self._tail[1:] > 0).to(torch.uint8).numpy().tobytes()
        scale = self._world_size / self._total if self._total > 0 else 0.0
        for target, reduced in zip(self._result_slices, self._sums, strict=True):
            torch.mul(reduced, scale, out=target)
