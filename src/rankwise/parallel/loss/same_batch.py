# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks run backward for the same batch: a rank that skips one is a step ahead from there on.

Gradients of unlike batches would be averaged silently: lanes pair what ranks send by its order. Used by on_ranks.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING

from rankwise.errors import CollectiveMismatch, fold_ranks, fold_values
from rankwise.session import current_or_none

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Batch = tuple[int, int, int]
    """Number of the loader, epoch, and number of the global batch in it."""

_BATCHES = 2**20
_EPOCHS = 2**12
_LOADERS = 2**12


def batch_in_hand() -> int:
    """Return a number for the batch that this thread's loop has taken last; 0 where no loader of ours gave one."""
    session = current_or_none()
    batch = None if session is None else session.batch
    # A thread that reads ahead is at another batch than the one trained on.
    if batch is None or batch.thread != get_ident():
        return 0
    epoch = batch.epoch % _EPOCHS
    return 1 + batch.number % _BATCHES + _BATCHES * (epoch + _EPOCHS * (batch.loader % _LOADERS))


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
        raise _unlike(batches, model_name, "" if are_all_ranks else f" of the {len(reported)} along dp_replicate")


def _batch_of(number: int) -> Batch:
    rest, batch = divmod(number - 1, _BATCHES)
    loader, epoch = divmod(rest, _EPOCHS)
    return loader, epoch, batch


def _unlike(batches: Mapping[int, Batch], model_name: str, among: str) -> CollectiveMismatch:
    behind = min(batches.values())
    ahead = [rank for rank, batch in batches.items() if batch != behind]
    return CollectiveMismatch(
        f"{fold_ranks(ahead)}{among} ran no backward for batch {behind[2]} of epoch {behind[1]}, for which others run "
        f"it now: gradients of {model_name} would be averaged over different batches.",
        evidence=fold_values(
            {rank: f"batch {number} of epoch {epoch}" for rank, (_, epoch, number) in batches.items()}
        ),
        do="skip a step, or leave a loop, on all ranks or on none: decide by rankwise.mean(loss, len(x)), which is the "
        "same on every rank and leaves empty shares out; for a norm of gradients, which are the same already, after "
        "backward()",
    )
