# SPDX-License-Identifier: Apache-2.0
"""Which batch a rank is at, as a number that travels with its report, and the error where ranks are at different ones.

A rank that skips a batch is a step ahead from there on, and every later gradient is a mean over different batches. Used
by loss_on_ranks.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING

from rankwise.comm.session import current_or_none
from rankwise.errors import CollectiveMismatch, fold_ranks, fold_values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    BatchNumbers = tuple[int, int, int]
    """Number of the loader, epoch, and number of the global batch in it."""

_NUM_BATCHES = 2**20
_NUM_EPOCHS = 2**12
_NUM_LOADERS = 2**12


def batch_in_hand() -> int:
    """Return a number for the batch that this thread's loop has taken last; 0 where no loader of ours gave one."""
    session = current_or_none()
    batch = None if session is None else session.batch
    # A thread that reads ahead is at another batch than the one trained on.
    if batch is None or batch.thread != get_ident():
        return 0
    epoch = batch.epoch % _NUM_EPOCHS
    return 1 + batch.number % _NUM_BATCHES + _NUM_BATCHES * (epoch + _NUM_EPOCHS * (batch.loader % _NUM_LOADERS))


def check_same_batch(reported: Sequence[float], model_name: str, *, are_all_ranks: bool) -> None:
    """Raise if ranks are at different batches of one loader.

    Called by: every rank, with the same.

    Args:
        reported: by each rank what :func:`batch_in_hand` returned there.
        model_name: for the error.
        are_all_ranks: whether the model has a copy on every rank of the world.

    Raises:
        CollectiveMismatch: names the ranks that are ahead.
    """
    if len(set(reported)) == 1:
        return
    batches = {rank: _batch_of(round(number)) for rank, number in enumerate(reported) if round(number)}
    # A loader that only some ranks iterate, as one for validation, says nothing of the others.
    if len({loader for loader, _, _ in batches.values()}) == 1 and len(set(batches.values())) > 1:
        # Where ranks are laid out along axes, those with a copy are numbered by themselves.
        raise _different_batches(
            batches, model_name, "" if are_all_ranks else f" of the {len(reported)} along dp_replicate"
        )


def _batch_of(number: int) -> BatchNumbers:
    rest, batch = divmod(number - 1, _NUM_BATCHES)
    loader, epoch = divmod(rest, _NUM_EPOCHS)
    return loader, epoch, batch


def _different_batches(batches: Mapping[int, BatchNumbers], model_name: str, among: str) -> CollectiveMismatch:
    behind = min(batches.values())
    ahead = [rank for rank, batch in batches.items() if batch != behind]
    return CollectiveMismatch(
        f"{fold_ranks(ahead)}{among} did not run backward for batch {behind[2]} of epoch {behind[1]}, which "
        f"other ranks now run: gradients of {model_name} would be averaged over different batches.",
        evidence=fold_values(
            {rank: f"batch {number} of epoch {epoch}" for rank, (_, epoch, number) in batches.items()}
        ),
        do="skip a step or leave a loop on all ranks or on none: decide from rankwise.mean(loss, len(x)), which "
        "is the same on every rank and ignores ranks without samples; decide from a gradient norm after "
        "backward(), when it is the same on every rank",
    )
