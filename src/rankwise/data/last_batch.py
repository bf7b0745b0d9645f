# SPDX-License-Identifier: Apache-2.0
"""How many samples the batch held that a rank failed with, in words.

An error that the training loop raises does not pass through the loader; whatever reports the rank's failure adds
these words to it. Imported by ``loader``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.data.shards import Shards


def words_of_batch(shards: Shards, start: int, stop: int) -> str | None:
    """Return what an error should say of the batch that this rank was given last; ``None`` where it is a whole one.

    Args:
        shards: how global batches are cut.
        start: position of the epoch at which the global batch begins.
        stop: position at which it ends.
    """
    low, high = shards.local_part(start, stop)
    usual_low, usual_high = shards.local_part(0, shards.global_batch_size)
    num_samples = high - low
    if num_samples == usual_high - usual_low:
        return None
    samples = "1 sample" if num_samples == 1 else f"{num_samples} samples"
    return (
        f"rankwise: the last batch that this rank was given by its DataLoader held {samples}. It is its part of the "
        f"epoch's last global batch, which has {stop - start} of {shards.global_batch_size} samples. "
        'Pass remainder="drop" to rankwise.DataLoader if the error is about that.'
    )


def words_of_share(shards: Shards) -> tuple[int, str] | None:
    """Return the samples of a whole global batch, and what an error that names their number should say besides.

    ``None`` where one rank takes them all.
    """
    low, high = shards.local_part(0, shards.global_batch_size)
    if high - low == shards.global_batch_size:
        return None
    words = (
        f"rankwise: this rank was given {high - low} of the {shards.global_batch_size} samples of the global batch. If "
        "the error is about that, take the size from the batch, as in len(x), not from a constant."
    )
    return shards.global_batch_size, words
