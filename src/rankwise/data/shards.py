# SPDX-License-Identifier: Apache-2.0
"""The positions of an epoch: which form a global batch, which of these a rank takes, and where a training loop is.

A position counts samples of an epoch, taken by all ranks together, so it is the same on any number of ranks.
Holds no order and no dataset; imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankwise.errors import ConfigurationError, DatasetError, fold_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Indices = npt.NDArray[np.int64]


REMAINDERS = ("keep", "drop")
_CHUNK = 4096
"""Positions looked up at once: one lookup of 4096 costs as much as a few of 64."""

State = dict[str, Any]


def rank_slice(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the part of ``[start, stop)`` that ``rank`` takes: contiguous, as even as possible.

    If it does not divide, the first ranks take one more. A rank may get nothing: ``(s, s)``.
    """
    each, more = divmod(stop - start, world_size)
    first = start + rank * each + min(rank, more)
    return first, first + each + (rank < more)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """How the epochs of one dataset are split into global batches, and these into the ranks' parts.

    Global batch ``b`` of an epoch begun at ``position`` covers the positions from ``position + b *
    G`` on, ``G`` of them or the rest. Which samples these are does not depend on the number of
    ranks.
    """

    length: int
    """Samples of one epoch."""
    global_batch_size: int
    """``G``: samples that all ranks together take in one step; 0 if batches are of any size."""
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

    def local_part(self, start: int, stop: int) -> tuple[int, int]:
        """Return the part of the global batch ``[start, stop)`` that this rank takes."""
        return rank_slice(start, stop, self.rank, self.world_size)


def resolve_global_batch_size(global_batch_size: int | None, local_batch_size: int | None, world_size: int) -> int:
    """Return the samples per step of all ranks, from whichever of the two sizes was given.

    Raises:
        ConfigurationError: both or neither were given, a size is not a positive integer, or the global
            batch is smaller than the number of ranks.
    """
    if (global_batch_size is None) == (local_batch_size is None):
        is_missing = global_batch_size is None
        raise ConfigurationError(
            "Pass exactly one of global_batch_size and local_batch_size; "
            f"{'neither was' if is_missing else 'both were'} given.",
            evidence=None
            if is_missing
            else f"global_batch_size={global_batch_size}, local_batch_size={local_batch_size}",
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
    """Return the split for these arguments.

    Raises:
        ConfigurationError: they are invalid, contradict each other, or leave no batch.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank={rank} is not valid with world_size={world_size}.",
            do="pass world_size of at least 1 and a rank from 0 to world_size - 1",
        )
    if remainder not in REMAINDERS:
        raise ConfigurationError(
            f"remainder={remainder!r} is invalid.",
            do='use "keep" (the last, short batch is split over the ranks) or "drop" (it is left out)',
        )
    shards = Shards(
        length=length,
        global_batch_size=resolve_global_batch_size(global_batch_size, local_batch_size, world_size),
        remainder=remainder,
        rank=rank,
        world_size=world_size,
    )
    if length and not shards.num_batches():
        raise ConfigurationError(
            f'remainder="drop" leaves nothing: {length} samples do not fill one global batch of '
            f"{shards.global_batch_size}.",
            do=f'pass remainder="keep", or a batch size that makes at most {length} samples per step of all ranks',
        )
    return shards


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} must be a positive integer, got {value!r}.", do=f"pass {name}=1 or more")
    return value


def note_on_short_batch(shards: Shards, start: int, stop: int) -> str | None:
    """Return a note for errors about this rank's batch of ``[start, stop)``; ``None`` if it is a full one."""
    low, high = shards.local_part(start, stop)
    usual_low, usual_high = shards.local_part(0, shards.global_batch_size)
    num_samples = high - low
    if num_samples == usual_high - usual_low and shards.global_batch_size:
        return None
    samples = "1 sample" if num_samples == 1 else f"{num_samples} samples"
    if not shards.global_batch_size:
        return (
            f"rankwise: the last batch that this rank got from its DataLoader held {samples}. It is its part of a "
            f"global batch of {stop - start} samples."
        )
    return (
        f"rankwise: the last batch that this rank got from its DataLoader held {samples}. It is its part of the "
        f"epoch's last global batch, which has {stop - start} of {shards.global_batch_size} samples. "
        'Pass remainder="drop" to rankwise.DataLoader if the error is about that; in an evaluation, where every sample '
        "counts, skip what cannot take an empty batch: if len(x)."
    )


def note_on_share(shards: Shards) -> tuple[int, str] | None:
    """Return the samples of a full global batch, and a note for errors that mention this number.

    ``None`` if one rank takes them all.
    """
    low, high = shards.local_part(0, shards.global_batch_size)
    if high - low == shards.global_batch_size:
        return None
    words = (
        f"rankwise: this rank got {high - low} of the {shards.global_batch_size} samples of the global batch. If "
        "the error is about that, take the size from the batch, as in len(x), not from a constant."
    )
    return shards.global_batch_size, words


class BatchRequest(NamedTuple):
    """One rank's part of a global batch: what to read."""

    epoch: int
    stop: int
    """Position of the epoch at which the global batch ends. Returned with the batch."""
    indices: npt.NDArray[np.int64]
    """[samples of this rank] their indices in the dataset; may be empty in the last batch."""
    stand_in: int
    """A sample of a short global batch, to learn the shape of an empty part from; else -1."""


def local_batches(
    shards: Shards, order: Callable[[Indices], Indices], epoch: int, position: int = 0
) -> Iterator[BatchRequest]:
    """Yield this rank's part of each global batch from ``position`` to the end of the epoch.

    ``order`` maps positions of the epoch to indices of the dataset.
    """
    size, end = shards.global_batch_size, shards.stop(position)
    low, high = shards.local_part(0, size)
    within = np.arange(low, high)
    per_chunk = max(1, _CHUNK // (high - low))
    start = position
    while end - start >= size:
        count = min(per_chunk, (end - start) // size)
        starts = start + size * np.arange(count)
        for row in order(starts[:, None] + within):
            start += size
            yield BatchRequest(epoch, start, row, -1)
    if start < end:
        yield _request(shards, order, epoch, start, end)


def _request(shards: Shards, order: Callable[[Indices], Indices], epoch: int, start: int, stop: int) -> BatchRequest:
    """Return this rank's part of the global batch ``[start, stop)``."""
    first = int(order(np.array([start]))[0])
    return BatchRequest(epoch, stop, order(np.arange(*shards.local_part(start, stop))), first)


def local_parts(
    shards: Shards, order: Callable[[Indices], Indices], ends: Indices, epoch: int, position: int = 0
) -> Iterator[BatchRequest]:
    """Yield this rank's part of each global batch from ``position`` on; the batches end at ``ends``."""
    for end in ends[ends > position].tolist():
        yield _request(shards, order, epoch, position, end)
        position = end


class EpochCursor:
    """The epoch and position of one loader or sampler.

    An epoch that was left early, by ``break`` or an error, is over: the next iteration begins the next epoch. If only
    one batch was taken, that counts as a look at the data: the next iteration begins at the same place.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.position = 0
        self.start = 0
        """Position at which the current iteration began, or the next one will begin."""
        self.is_running = False
        """Whether an iteration has begun and not reached the end of its epoch."""
        self._taken = 0
        self._iteration = 0

    def begin(self) -> int:
        """Begin an iteration at ``epoch`` and ``start``; return the number its calls must pass."""
        if self._taken > 1:
            self._turn_to(self.epoch + 1, 0)
        else:
            self._turn_to(self.epoch, self.start)
        self.is_running = True
        self._iteration += 1
        return self._iteration

    def advance(self, iteration: int, position: int) -> None:
        """Move to the end of the batch that the loop takes, ``position``; ignore all but the newest iteration."""
        if iteration == self._iteration:
            self.position = position
            self._taken += 1

    def finish(self, iteration: int) -> None:
        """Move to the next epoch: the loop has reached the end of this one."""
        if iteration == self._iteration:
            self._turn_to(self.epoch + 1, 0)

    def move_to(self, epoch: int, position: int) -> None:
        """Begin the next iteration at that place; a current one no longer counts."""
        self._iteration += 1
        self._turn_to(epoch, position)

    def place(self) -> tuple[int, int]:
        """Return ``(epoch, position)`` to continue from.

        After the last batch that is the end of the epoch, not the next one: the code after the
        ``for`` (a scheduler's step, a validation) has not run yet, and runs after a resume.
        """
        return self.epoch, self.position

    def _turn_to(self, epoch: int, position: int) -> None:
        self.epoch, self.start, self.position = epoch, position, position
        self.is_running = False
        self._taken = 0


def place_in(state: Mapping[str, Any], facts: Mapping[str, object]) -> tuple[int, int]:
    """Return ``(epoch, position)`` of a saved state, after checking that it has the same order.

    Args:
        state: as ``state_dict`` returned it: ``facts``, ``epoch`` and ``position``.
        facts: settings of the order now: ``dataset_length``, ``seed``, ``shuffle``; with a sampler ``sampler_length``.

    Raises:
        DatasetError: the dataset had another length.
        ConfigurationError: it had another order, or this is not such a state.
    """
    held = list(state) if isinstance(state, Mapping) else []
    missing = [name for name in ("epoch", "position", *facts) if name not in {*held, "sampler_length"}]
    if missing:
        raise ConfigurationError(
            "This is not the state of a loader or sampler: it has no " + ", ".join(missing) + ".",
            evidence="it holds " + (", ".join(map(str, held)) or "nothing"),
            do="pass what state_dict() of a rankwise DataLoader or ShardedSampler returned",
        )
    for name in dict.fromkeys([*facts, "sampler_length"]):
        now = facts.get(name)
        if state.get(name) != now:
            kind = DatasetError if name == "dataset_length" else ConfigurationError
            raise kind(
                f"The state was saved with {name}={state.get(name)!r}, and now {name}={now!r}: "
                "its position refers to other samples in this order.",
                do="use the dataset it was saved with, or do not load this state"
                if name == "dataset_length"
                else "pass a sampler as when the state was saved, or none if there was none"
                if name == "sampler_length"
                else f"pass {name}={state[name]!r}",
            )
    epoch, position, length = state["epoch"], state["position"], facts.get("sampler_length", facts["dataset_length"])
    within = isinstance(position, int) and position >= 0 and (not isinstance(length, int) or position <= length)
    if not (isinstance(epoch, int) and epoch >= 0 and within):
        raise ConfigurationError(
            f"Position {position!r} of epoch {epoch!r} does not exist.",
            evidence=f"an epoch has {length} samples",
            do="pass an epoch of at least 0 and a position between 0 and the dataset's length",
        )
    return epoch, position


def check_not_empty(length: object, *, where: str | None = None, num_ranks: int = 1) -> None:
    """Raise if the dataset is known to have no samples.

    Raises:
        DatasetError: ``length`` is 0.
    """
    if length == 0:
        raise DatasetError(
            "The dataset is empty.",
            where=where,
            evidence=fold_values(dict.fromkeys(range(num_ranks), "0 samples")),
            do="check the path or the filter that the dataset was created with",
        )
