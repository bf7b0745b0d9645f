# SPDX-License-Identifier: Apache-2.0
"""The interface of every exchange: the collectives that rankwise is built on, and channels for gradients.

Also the short texts that ranks exchange through one: what each has, or what each has called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import torch

from rankwise.health import collective_mismatch
from rankwise.health.call_site import user_call_site, words
from rankwise.health.collective_mismatch import CollectiveCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.errors import CollectiveMismatch
    from rankwise.health.failure_detector import FailureDetector

Amount: TypeAlias = "float | torch.Tensor"
"""A number; on a device it may be a tensor of no dims, which the CPU does not read: that would wait for the device."""
NOTE_BYTES = 256
"""Size of the note that a rank can send in the collective in which ranks agree on a call."""
TEXT_BYTES = 512
LONGEST_CALL_BYTES = 2**16
WHAT_EACH_CALLED = "what each rank called"


@dataclass(frozen=True)
class ChannelSize:
    """What is sent on a channel."""

    num_elements: int
    num_flags: int
    dtype: torch.dtype
    device: torch.device


def describe_channels(sizes: Sequence[ChannelSize], what: str) -> list[str]:
    """Return what is sent on each channel, as ``gradients of Net, bucket 0: float32[1234]``."""
    return [
        f"{what}, bucket {number}: {str(size.dtype).removeprefix('torch.')}[{size.num_elements}]"
        for number, size in enumerate(sizes)
    ]


class BucketChannel(Protocol):
    """A channel for one bucket of gradients, reused in every step: weighted sums, divided once.

    A step is: :meth:`claim`, write :attr:`body`, :meth:`start`, :meth:`finish`; the same steps on every rank. A channel
    of torch's group on a device takes every :data:`Amount`.
    """

    body: torch.Tensor
    """[num_elements], this rank's contribution. Written between ``claim`` and ``start``."""
    result: torch.Tensor
    """[num_elements], the mean. Valid from ``finish``, which may replace it, to the next ``claim``."""

    def can_claim(self) -> bool:
        """Return whether ``claim`` and ``start`` would return at once."""
        ...

    def claim(self) -> None:
        """Wait until ``body`` may be written. Other ranks must be completing the same step."""
        ...

    def factor(self, share: float) -> Amount:
        """Return the factor to multiply the gradients by when they are copied into ``body``."""
        ...

    def start(self, share: float, weight: float, absent: Sequence[int]) -> None:
        """Send ``body``.

        Args:
            share: the weight of the gradients; with 0 nothing of the body enters the result, not even a NaN.
            weight: this rank's part of what the sum over all ranks is divided by.
            absent: numbers of the flags that this rank does not set.
        """
        ...

    def finish(self) -> None:
        """Wait until ``result`` is ready.

        It is sum_r share_r g_r / sum_r weight_r, and zero if the weights sum to zero; the same bits on every
        rank.
        """
        ...

    def total(self) -> Amount:
        """Return the sum of the weights, after ``finish`` and before the next ``start``."""
        ...

    def is_flag_set(self, flag: int) -> bool:
        """Return whether any rank has set a flag, after ``finish``."""
        ...


Piece = tuple[int, "torch.Tensor", float]
"""A part of what a rank contributes: its first element in the body, a tensor [n], and the factor for it."""


@runtime_checkable
class TakesOwnPart(Protocol):
    """A channel of which a part of the body is only read by this rank."""

    own: slice
    """The elements of that part."""

    def contribute(self, pieces: Sequence[Piece]) -> None:
        """Use tensors for that part in the next step, in place of what ``body`` holds there.

        Args:
            pieces: all of the part, in order. They may not change before ``finish``.
        """
        ...


class Exchange(Protocol):
    """How tensors travel between the ranks of a world. Results are new tensors, the same bits on every rank."""

    rank: int
    world_size: int
    detector: FailureDetector

    def agree(self, what: str) -> None:
        """Check that the next collective belongs to the call ``what`` on every rank.

        Raises:
            CollectiveMismatch: it does not; from here, or from that collective. Nothing was sent, and the ranks can
                continue.
        """
        ...

    def gather_notes(self, note: bytes, what: str) -> list[bytes]:
        """Return the notes of all ranks in rank order, each padded to ``NOTE_BYTES`` with zeros: one collective.

        Args:
            note: at most ``NOTE_BYTES``.
            what: the call that it belongs to, on every rank. Raises as :meth:`agree` does.
        """
        ...

    def barrier(self, what: str) -> None:
        """Return when every rank has reached it. Raises as :meth:`agree` does."""
        ...

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, what: str) -> torch.Tensor:
        """Return the reduction over all ranks of contiguous tensors of one shape and dtype."""
        ...

    def all_gather(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        """Return [world_size, *tensor.shape], the tensors of all ranks in rank order."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int, *, what: str) -> torch.Tensor:
        """Return the tensor of rank ``source``; ``tensor`` is of its shape and dtype."""
        ...

    def all_to_all(self, tensor: torch.Tensor, sizes: Sequence[Sequence[int]], *, what: str) -> torch.Tensor:
        """Return what every rank sends to this one, in rank order.

        Args:
            tensor: [n], bytes: what this rank sends to each, in rank order.
            sizes: bytes from each rank (outer) to each; the same on every rank.
            what: in words.
        """
        ...

    def dup(self) -> Exchange:
        """Return another exchange of the same ranks, whose collectives need no order relative to this one's.

        Called by: every rank, in the same order.
        """
        ...

    def split(self, groups: Sequence[Sequence[int]]) -> Exchange:
        """Return an exchange of some of its ranks, renumbered from 0, in the order given.

        Called by: every rank, with the same groups.

        Args:
            groups: every rank is in one of them. Each becomes an exchange of its own.
        """
        ...

    def channel_bytes(self, device: torch.device) -> int:
        """Return the best channel size in bytes."""
        ...

    def channels(self, sizes: Sequence[ChannelSize], what: str = "gradients") -> list[BucketChannel]:
        """Return a channel for each size, to be started in this order.

        Called by: every rank, in the same order.

        Args:
            sizes: the same on every rank.
            what: a description of what is sent on them.

        Raises:
            CollectiveMismatch: the sizes are not the same on every rank.
        """
        ...

    def close(self) -> None:
        """Disconnect from the other ranks. Nothing can be sent afterwards."""
        ...


# -- short texts ---------------------------------------------------------------------------------------


def gather_texts(exchange: Exchange, text: str, *, what: str) -> list[str]:
    """Return the text of every rank, cut to ``TEXT_BYTES``.

    Called by: every rank.
    """
    rows = exchange.all_gather(row_of(text.encode()[:TEXT_BYTES], TEXT_BYTES), what=what)
    return [one.rstrip(b"\0").decode(errors="replace") for one in bytes_of_rows(rows)]


def row_of(data: bytes, size_bytes: int) -> torch.Tensor:
    """Return bytes as [size_bytes], padded with zeros."""
    return torch.frombuffer(bytearray(data.ljust(size_bytes, b"\0")), dtype=torch.uint8)


def bytes_of_rows(rows: torch.Tensor) -> list[bytes]:
    """Return the bytes of [number, size_bytes]."""
    number, size = rows.shape
    data: bytes = rows.numpy().tobytes()
    return [data[row * size : (row + 1) * size] for row in range(number)]


def calls_differ(
    gather: Callable[[torch.Tensor], torch.Tensor], called: str, hostname: str, ranks: Sequence[int], world_size: int
) -> CollectiveMismatch:
    """Return the error for ranks that called different things.

    Called by: every rank of ``ranks``. ``called`` is what this rank called; ``gather`` returns the tensors of
    ``ranks``, [len(ranks), ...], all of one shape.
    """
    text = "\0".join((hostname, words(user_call_site()), called))
    data = torch.frombuffer(bytearray(text.encode()[:LONGEST_CALL_BYTES]), dtype=torch.uint8)
    lengths = gather(torch.tensor([data.numel()])).flatten().tolist()
    padded = data.new_zeros(max(lengths))
    padded[: data.numel()] = data
    calls: dict[int, CollectiveCall] = {}
    for rank, row, length in zip(ranks, gather(padded), lengths, strict=True):
        host, site, other = bytes(row[:length].tolist()).decode(errors="replace").split("\0", 2)
        calls[rank] = CollectiveCall(other, site, host)
    return collective_mismatch.calls_differ(calls, world_size)
