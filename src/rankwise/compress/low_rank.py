# SPDX-License-Identifier: Apache-2.0
"""A channel whose matrices are sent as two thin factors: PowerSGD.

Legend: a matrix M [n, m] of this rank's gradients, factors P [n, r] and Q [m, r]. Different processors round products
of matrices differently: values that must be equal on all ranks come from rank zero, or from elementwise operations.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rankwise.compress.allgather_channel import ErrorFeedback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import BucketChannel, ChannelSize, Exchange

SEED = 5
DEPENDENT = 1e-10
"""The part of a column's length that must be new to count as a direction: less is rounding."""
CHUNK_ELEMENTS = 2**16
"""As many as the cache of a core holds."""


class FactorPlan:
    """Which parts of a bucket are factored, and how many numbers are sent for them.

    Args:
        shapes: of the gradients in the bucket, in order.
        rank: r.
    """

    def __init__(self, shapes: Sequence[torch.Size], rank: int) -> None:
        self.shapes = shapes
        self.matrices: list[tuple[int, int, int, int]] = []
        """Where each starts in the bucket, n, m and its own r."""
        self.rest: list[slice] = []
        """Parts that are not factored."""
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
        """How many numbers are sent first: the P of all matrices, and the rest."""
        self.num_second = sum(columns * rank for _, _, columns, rank in self.matrices)
        """How many are sent second: the Q of all matrices."""


class Factors:
    """The common part of a model's channels: all second factors are sent before any is waited for.

    Args:
        exchange: to broadcast rank zero's bases.
        what: names the gradients in errors.
    """

    def __init__(self, exchange: Exchange, what: str) -> None:
        self.channels: list[LowRankChannel] = []
        self._exchange = exchange
        self._what = what
        self._is_over = False

    def prepare(self) -> None:
        """Begin a step."""
        self._is_over = False

    def finish(self) -> None:
        """Finish all channels, once per step."""
        if self._is_over:
            return
        for channel in self.channels:
            channel.take_first()
        with_matrices = [channel for channel in self.channels if channel.plan.matrices]
        by_device: dict[torch.device, list[LowRankChannel]] = {}
        for channel in with_matrices:
            by_device.setdefault(channel.body.device, []).append(channel)
        for device, channels in by_device.items():
            self._agree_on_bases(channels, device)
        for channel in with_matrices:
            channel.start_second()
        for channel in self.channels:
            channel.finish_second()
        self._is_over = True

    def _agree_on_bases(self, channels: Sequence[LowRankChannel], device: torch.device) -> None:
        ranks = [rank for channel in channels for *_, rank in channel.plan.matrices]
        squares = torch.zeros(sum(rank * rank for rank in ranks), dtype=torch.float64)
        if self._exchange.rank == 0:
            # Few numbers: the CPU is as fast as a GPU, and waits for it once per channel.
            sums = [p for channel in channels for p in channel.first_factors(channel.sums.cpu())]
            torch.cat([orthonormaliser(p.double()).view(-1) for p in sums], out=squares)
        reported = self._exchange.broadcast(squares.to(device), 0, what=f"bases of {self._what}")
        mine = iter(reported.split([rank * rank for rank in ranks]))
        for channel in channels:
            channel.bases = [
                basis_of(p, next(mine).view(p.shape[1], p.shape[1])) for p in channel.first_factors(channel.sums)
            ]


class LowRankChannel:
    """See :class:`rankwise.comm.backends.protocol.BucketChannel`.

    Its many fields are one bucket's memory, reused by every step: gradients, both factors, and the error left out.

    Args:
        plan: of its bucket.
        first: a channel for the P and the rest, with the flags.
        second: a channel for the Q; ``None`` without matrices.
        size: of this channel.
        factors: of all channels.
    """

    def __init__(
        self, plan: FactorPlan, first: BucketChannel, second: BucketChannel | None, size: ChannelSize, factors: Factors
    ) -> None:
        self.plan = plan
        self._first = first
        self._second = second
        self._factors = factors
        self.body = self.result = torch.zeros(size.num_elements, dtype=size.dtype, device=size.device)
        self.feedback = ErrorFeedback(self.body, plan.shapes)
        self.bases: list[torch.Tensor] = []
        """[n, r] of each matrix, in this step."""
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
        factors.channels.append(self)

    @property
    def sums(self) -> torch.Tensor:
        """The sums that arrive first: the P of all matrices, and the rest."""
        return self._first.result

    def factor(self, share: float) -> float:
        """Return the share: the channels of the factors divide."""
        return share

    def first_factors(self, sums: torch.Tensor) -> list[torch.Tensor]:
        """Return the P [n, r] of each matrix in ``sums``."""
        sizes = [rows * rank for _, rows, _, rank in self.plan.matrices]
        parts = sums[: sum(sizes)].split(sizes)
        return [part.view(-1, rank) for part, (*_, rank) in zip(parts, self.plan.matrices, strict=True)]

    @torch.no_grad()
    def start(self, share: float, weight: float, absent: Sequence[int]) -> None:
        """Send the first factors."""
        self._factors.prepare()
        with _as_they_are(self.body):
            self._start(share, weight, absent)

    def _start(self, share: float, weight: float, absent: Sequence[int]) -> None:
        self.feedback.add_to(self.body, share, weight, absent)
        factor = self._first.factor(1.0)
        place = 0
        for (low, rows, columns, rank), q in zip(self.plan.matrices, self._q, strict=True):
            p = self.body[low : low + rows * columns].view(rows, columns) @ q
            self._first.body[place : place + rows * rank].copy_(p.view(-1)).mul_(factor)
            place += rows * rank
        for part in self.plan.rest:
            length = part.stop - part.start
            self._first.body[place : place + length].copy_(self.body[part]).mul_(factor)
            place += length
        self._weight = weight
        self._first.start(1.0, weight, absent)

    @torch.no_grad()
    def finish(self) -> None:
        """Send the second factors of all channels, and multiply both."""
        with _as_they_are(self.body):
            self._factors.finish()

    def take_first(self) -> None:
        """Wait for the first factors."""
        self._first.finish()

    def start_second(self) -> None:
        """Send the second factors, and leave the error of both in the body."""
        channel = self._second
        if channel is None:
            return
        channel.claim()
        factor = channel.factor(1.0)
        place = 0
        for (low, rows, columns, rank), basis in zip(self.plan.matrices, self.bases, strict=True):
            left = self.body[low : low + rows * columns].view(rows, columns)
            q = left.T @ basis
            left.sub_(basis @ q.T)
            channel.body[place : place + columns * rank].copy_(q.view(-1)).mul_(factor)
            place += columns * rank
        channel.start(1.0, self._weight, ())

    def finish_second(self) -> None:
        """Wait for the second factors, keep the compression error, and replace the body by the mean."""
        if self._second is not None:
            self._second.finish()
        for part in self.plan.rest:
            self.body[part].zero_()
        self.feedback.leave_out(self.body, 0.0, self.is_flag_set)
        if self._second is not None:
            self._multiply(self._second.result)
        place = self.plan.num_first
        for part in reversed(self.plan.rest):
            place -= part.stop - part.start
            self.result[part].copy_(self.sums[place : place + part.stop - part.start])

    def _multiply(self, sums: torch.Tensor) -> None:
        place = 0
        for number, ((low, rows, columns, rank), basis) in enumerate(zip(self.plan.matrices, self.bases, strict=True)):
            q = sums[place : place + columns * rank].view(columns, rank)
            place += columns * rank
            _product_into(self.result[low : low + rows * columns].view(rows, columns), basis, q)
            # Only its directions matter. Unscaled, the next P would grow with the square of the gradients.
            directions = q / q.abs().amax(0)
            self._q[number] = torch.where(directions.isfinite().all(0), directions, self._q[number])
        self.bases = []


def _as_they_are(tensor: torch.Tensor) -> torch.autocast:
    """Keep the dtype of products: backward may run under autocast, whose rounding has no error feedback."""
    return torch.autocast(tensor.device.type, enabled=False)


def orthonormaliser(p: torch.Tensor) -> torch.Tensor:
    """Return T [r, r] so that the columns of ``p`` @ T are orthonormal, or zero if they depend on others.

    It is NaN if ``p`` is not finite.
    """
    squares = p.new_zeros(p.shape[1], p.shape[1])
    if not bool(p.isfinite().all()):
        return squares.fill_(float("nan"))
    lengths = p.norm(dim=0)
    unit = p / torch.where(lengths > 0, lengths, 1.0)
    own = (torch.linalg.qr(unit, mode="r")[1].diagonal().abs() > DEPENDENT).nonzero()[:, 0]
    if len(own):
        triangle = torch.linalg.qr(unit[:, own], mode="r")[1]
        inverse = torch.linalg.solve_triangular(triangle, torch.eye(len(own), dtype=p.dtype), upper=True)
        squares[own[:, None], own] = inverse / lengths[own, None]
    return squares


def basis_of(p: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """Return ``p`` @ ``square``, the same bits on every processor."""
    basis = torch.empty_like(p)
    _product_into(basis, p.double(), square.T)
    return basis


def _product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Write ``left`` [n, r] @ ``right`` [m, r].T into ``out`` [n, m], the same bits on every processor."""
    if left.dtype in {torch.float16, torch.bfloat16}:
        left, right = left.float(), right.float()
    rows_of_right = right.T.contiguous()
    # As many rows at a time as stay in the cache, since every column takes a pass.
    step = max(CHUNK_ELEMENTS // out.shape[1], 1) if out.device.type == "cpu" else len(out)
    for part, of_left in zip(out.split(step), left.split(step), strict=True):
        total = of_left[:, :1] * rows_of_right[:1]
        for column, row in zip(of_left.T[1:], rows_of_right[1:], strict=True):
            # Not one fused operation: some processors round that once, and some twice.
            total += column[:, None] * row
        part.copy_(total)
