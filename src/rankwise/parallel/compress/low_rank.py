# SPDX-License-Identifier: Apache-2.0
"""A lane whose matrices travel as two thin factors: PowerSGD.

Legend: a matrix M [n, m] of what this rank gives, factors P [n, r] and Q [m, r].
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rankwise.parallel.compress.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.exchange.protocol import Lane, LaneSize

SEED = 5


class Plan:
    """Which parts of a bucket are matrices worth factoring, and how much travels of them.

    Args:
        shapes: of the gradients in the bucket, one behind the other.
        rank: r.
    """

    def __init__(self, shapes: Sequence[torch.Size], rank: int) -> None:
        self.matrices: list[tuple[int, int, int, int]] = []
        """Where each starts in the bucket, n, m and its own r."""
        self.rest: list[slice] = []
        """What travels as it is."""
        start = 0
        for shape in shapes:
            end = start + math.prod(shape)
            rows = shape[0] if len(shape) > 1 else 1
            columns = (end - start) // max(rows, 1)
            own_rank = min(rank, rows, columns)
            if (rows + columns) * own_rank < rows * columns:
                self.matrices.append((start, rows, columns, own_rank))
            else:
                self.rest.append(slice(start, end))
            start = end
        self.num_first = sum(rows * rank for _, rows, _, rank in self.matrices) + sum(
            part.stop - part.start for part in self.rest
        )
        """How many numbers travel at first: the P of all matrices, and the rest."""
        self.num_second = sum(columns * rank for _, _, columns, rank in self.matrices)
        """How many travel then: the Q of all matrices."""


class LowRankLane:
    """See :class:`rankwise.exchange.protocol.Lane`.

    Args:
        plan: of its bucket.
        first: a lane for the P and the rest, with the flags.
        second: a lane for the Q; ``None`` without matrices.
        size: of this lane.
    """

    def __init__(self, plan: Plan, first: Lane, second: Lane | None, size: LaneSize) -> None:
        self._plan = plan
        self._first = first
        self._second = second
        self.body = torch.zeros(size.num_elements, dtype=size.dtype, device=size.device)
        self.result = torch.zeros_like(self.body)
        self._memory = Memory(self.body)
        generator = torch.Generator().manual_seed(SEED)
        self._q = [
            torch.randn(columns, rank, generator=generator, dtype=torch.float64).to(self.body)
            for _, _, columns, rank in plan.matrices
        ]
        self._weight = 0.0
        self.can_claim = first.can_claim
        self.claim = first.claim
        self.total = first.total
        self.is_flag_set = first.is_flag_set

    def factor(self, share: float) -> float:
        """Return the share: the lanes below divide."""
        return share

    @torch.no_grad()
    def start(self, share: float, weight: float, absent: Sequence[int]) -> None:
        """Send the first factors."""
        with _as_they_are(self.body):
            self._start(share, weight, absent)

    def _start(self, share: float, weight: float, absent: Sequence[int]) -> None:
        self._memory.add_to(self.body, share, weight)
        factor = self._first.factor(1.0)
        place = 0
        for (low, rows, columns, rank), q in zip(self._plan.matrices, self._q, strict=True):
            p = self.body[low : low + rows * columns].view(rows, columns) @ q
            self._first.body[place : place + rows * rank].copy_(p.view(-1)).mul_(factor)
            place += rows * rank
        for part in self._plan.rest:
            length = part.stop - part.start
            self._first.body[place : place + length].copy_(self.body[part]).mul_(factor)
            place += length
        self._weight = weight
        self._first.start(1.0, weight, absent)

    @torch.no_grad()
    def finish(self) -> None:
        """Send the second factors, and multiply both."""
        with _as_they_are(self.body):
            self._finish()

    def _finish(self) -> None:
        self._first.finish()
        sums = self._first.result
        place = 0
        bases: list[torch.Tensor] = []
        for _, rows, _, rank in self._plan.matrices:
            bases.append(_orthonormal(sums[place : place + rows * rank].view(rows, rank)))
            place += rows * rank
        for part in self._plan.rest:
            length = part.stop - part.start
            self.result[part].copy_(sums[place : place + length])
            self.body[part].zero_()
            place += length
        if self._second is not None:
            self._exchange_second(self._second, bases)
        self._memory.leave_out(self.body)

    def _exchange_second(self, lane: Lane, bases: Sequence[torch.Tensor]) -> None:
        lane.claim()
        factor = lane.factor(1.0)
        place = 0
        for (low, rows, columns, rank), basis in zip(self._plan.matrices, bases, strict=True):
            left = self.body[low : low + rows * columns].view(rows, columns)
            q = left.T @ basis
            left.sub_(basis @ q.T)
            lane.body[place : place + columns * rank].copy_(q.view(-1)).mul_(factor)
            place += columns * rank
        lane.start(1.0, self._weight, ())
        lane.finish()
        place = 0
        for number, ((low, rows, columns, rank), basis) in enumerate(zip(self._plan.matrices, bases, strict=True)):
            q = lane.result[place : place + columns * rank].view(columns, rank)
            torch.mm(basis, q.T, out=self.result[low : low + rows * columns].view(rows, columns))
            # Only its directions count. As it is, the next P would be of the size of the square of the gradients.
            q = q / q.abs().amax()
            if bool(q.isfinite().all()):
                self._q[number] = q
            place += columns * rank


def _as_they_are(tensor: torch.Tensor) -> torch.autocast:
    """Have products keep their dtype: backward may run under autocast, whose rounding nobody would remember."""
    return torch.autocast(tensor.device.type, enabled=False)


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis [n, r] of the columns; of one that is not finite, the same without a number."""
    if not bool(matrix.isfinite().all()):
        return torch.full_like(matrix, float("nan"))
    wide = matrix.float() if matrix.dtype in {torch.float16, torch.bfloat16} else matrix
    return torch.linalg.qr(wide)[0].to(matrix.dtype)
