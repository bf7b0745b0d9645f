# SPDX-License-Identifier: Apache-2.0
"""Which positions of an epoch make a global batch, and which of these a rank takes.

Holds no order, no dataset and no state; imports no torch. Imported by ``sampler``, ``sources`` and
``loader``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

REMAINDERS = ("keep", "drop")


def rank_slice(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the part of ``[start, stop)`` that ``rank`` takes: contiguous, as even as it goes.

    Where it does not divide, the first ranks take one more. A rank may get nothing: ``(s, s)``.
    """
    each, more = divmod(stop - start, world_size)
    first = start + rank * each + min(rank, more)
    return first, first + each + (rank < more)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """How the epochs of one dataset are cut into global batches, and these into the ranks' parts.

    Global batch ``b`` of an epoch begun at ``position`` covers the positions from ``position + b *
    G`` on, ``G`` of them or what is left. Which samples these are does not depend on the number of
    ranks.
    """

    length: int
    """Samples of one epoch."""
    global_batch_size: int
    """``G``: samples that all ranks together take in one step."""
    remainder: str
    """``"keep"``: the last global batch of an epoch may be short; ``"drop"``: it is left out."""
    rank: int
    world_size: int

    def stop(self, position: int = 0) -> int:
        """Return where an epoch begun at ``position`` ends: at ``length``, with "drop" before."""
        left = max(0, self.length - position)
        if self.remainder == "drop":
            left -= left % self.global_batch_size
        return position + left

    def num_batches(self, position: int = 0) -> int:
        """Return how many global batches there are from ``position`` to the end of the epoch."""
        return -(-(self.stop(position) - position) // self.global_batch_size)

    def global_batches(self, position: int = 0) -> Iterator[tuple[int, int]]:
        """Yield ``(start, stop)`` of each global batch from ``position`` on."""
        end = self.stop(position)
        for start in range(position, end, self.global_batch_size):
            yield start, min(start + self.global_batch_size, end)

    def local_part(self, start: int, stop: int) -> tuple[int, int]:
        """Return the part of the global batch ``[start, stop)`` that this rank takes."""
        return rank_slice(start, stop, self.rank, self.world_size)

    def of_length(self, length: int) -> Shards:
        """Return the same cutting for another length."""
        return replace(self, length=length)


def resolve_global_batch_size(global_batch_size: int | None, local_batch_size: int | None, world_size: int) -> int:
    """Return the samples per step of all ranks, from whichever of the two sizes was given.

    Raises:
        ConfigurationError: both or none were given, a size is not a positive integer, or the global
            batch is smaller than the number of ranks.
    """
    if (global_batch_size is None) == (local_batch_size is None):
        given = "Neither was" if global_batch_size is None else "Both were"
        raise ConfigurationError(
            f"Exactly one of global_batch_size and local_batch_size is needed. {given} given.",
            evidence=f"global_batch_size={global_batch_size}, local_batch_size={local_batch_size}",
            do="pass global_batch_size (samples per step of all ranks together: the result "
            "does not depend on the number of ranks), or local_batch_size (samples per step "
            "of each rank)",
        )
    if local_batch_size is not None:
        return _positive("local_batch_size", local_batch_size) * world_size
    total = _positive("global_batch_size", global_batch_size)
    if total < world_size:
        raise ConfigurationError(
            f"global_batch_size={total} is smaller than the number of ranks, {world_size}: "
            f"{world_size - total} of them would never get a sample.",
            evidence=f"{total} samples / {world_size} ranks = {total / world_size:.2f} samples per rank and step",
            do=f"pass global_batch_size={world_size} or more, or start at most {total} ranks",
        )
    return total


def make_shards(
    length: int,
    *,
    global_batch_size: int | None,
    local_batch_size: int | None,
    remainder: str,
    rank: int,
    world_size: int,
) -> Shards:
    """Return the cutting these arguments ask for.

    Raises:
        ConfigurationError: they are bad, contradict each other, or leave no batch at all.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigurationError(
            f"There is no rank {rank} among {world_size}.",
            do="pass world_size of at least 1 and a rank from 0 to world_size - 1",
        )
    _check_remainder(remainder)
    shards = Shards(
        length=length,
        global_batch_size=resolve_global_batch_size(global_batch_size, local_batch_size, world_size),
        remainder=remainder,
        rank=rank,
        world_size=world_size,
    )
    if length and not shards.num_batches():
        raise ConfigurationError(
            f'remainder="drop" leaves nothing: {length} samples make no whole global batch of '
            f"{shards.global_batch_size}.",
            do=f'pass remainder="keep", or a batch size that makes at most {length} samples per step of all ranks',
        )
    return shards


def _check_remainder(remainder: str) -> None:
    if remainder not in REMAINDERS:
        raise ConfigurationError(
            f"There is no remainder={remainder!r}.",
            do='use "keep" (the last, short batch is split over the ranks) or "drop" (it is left out)',
        )


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} must be a positive integer, not {value!r}.", do=f"pass {name}=1 or more")
    return value
