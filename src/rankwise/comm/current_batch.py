# SPDX-License-Identifier: Apache-2.0
"""The batches that this rank's loops over loaders are using, and what is called when one is taken or a loop ends.

Loaders note them; random numbers, losses and errors read them. Ranks compare the numbers of their batches in backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Literal

from rankwise.errors import CollectiveMismatch, fold_ranks, fold_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


@dataclass(frozen=True, slots=True)
class CurrentBatch:
    """The batch that a training loop is using: a rank's part of one global batch.

    A loader records it; random numbers depend on it, and ranks compare it when they run backward.
    """

    loader: int
    """Number of the loader that yielded it, the same on every rank; 0 without a loader."""
    epoch: int
    number: int
    """Of the global batch, within the epoch."""
    num: int
    """Samples of this rank; 0 if a short batch has none left for it."""
    num_global: int
    """Samples of all ranks together."""
    start: int
    """The index of this rank's first sample among them."""
    values: object = None
    """The batch that the loader yielded, to recognize tensors derived from it."""
    thread: int = 0
    """The thread that took it."""
    dims: Callable[[], Mapping[str, int]] | None = None
    """Returns which dim of each tensor in a batch holds the samples, if a function of the user's made the batch."""

    indices: Callable[[], Sequence[int]] | None = None
    """Returns the places of this rank's samples in the dataset, where they have any."""

    def dim_of_samples(self, path: str, tensor: torch.Tensor) -> int | None:
        """Return which dim of the tensor at ``path`` in the batch holds the samples; ``None`` if none does."""
        dims = [dim for dim, size in enumerate(tensor.shape) if size == self.num]
        if self.dims is None:
            return 0 if dims[:1] == [0] else None
        # Also where a single dim has the size: it may be that of something else, as of the features of joined rows.
        found = self.dims().get(path) if dims else None
        return found if found in dims else None


@dataclass
class BatchesInUse:
    """The batches of one session's loaders."""

    current: CurrentBatch | None = None
    """The batch this rank trains on, if it is from a loader whose loop is running."""
    in_use: dict[int, CurrentBatch] = field(default_factory=dict)
    """The last batch of each loader, by its number, until its loop ends; the latest one last."""
    reads: Literal["", "samples", "batches"] = ""
    """What a loader reads now, if it does: random numbers are seeded by sample where it reads one sample at a time."""
    failure_note: str | None = None
    """A note on the current batch, to be added to an error that this rank raises now."""
    share_note: tuple[int, str] | None = None
    """The samples of a global batch, and the note to add to an error that mentions that number."""
    _taking: list[Callable[[CurrentBatch], None]] = field(default_factory=list, init=False)
    _looping: list[Callable[[], None]] = field(default_factory=list, init=False)
    _outer: dict[int, CurrentBatch | None] = field(default_factory=dict, init=False)
    """The batch in hand when the loop over a loader began, by the loader's number."""

    @property
    def latest(self) -> CurrentBatch | None:
        """The last batch of a loader, even if its loop was left early."""
        return next(reversed(self.in_use.values()), None)

    def begin_batch(
        self, batch: CurrentBatch, failure_note: str | None = None, share_note: tuple[int, str] | None = None
    ) -> None:
        """Note the batch that a loader is about to yield, and the note for errors raised meanwhile."""
        self.failure_note = failure_note
        self.share_note = share_note
        if batch.loader not in self._outer:
            self._outer[batch.loader] = self.current
        self.current = batch
        self.in_use.pop(batch.loader, None)
        self.in_use[batch.loader] = batch
        for action in self._taking:
            action(batch)

    def break_off(self, batch: CurrentBatch | None) -> None:
        """Note that a loop was left during ``batch``: later work does not belong to it."""
        if batch is not None and self.current is batch:
            self.current = self._outer_of(batch.loader)

    def finish_loop(self, loader: int) -> None:
        """Note that the loop over a loader has ended."""
        self.failure_note = self.share_note = None
        self.in_use.pop(loader, None)
        self.current = self._outer_of(loader)
        for action in self._looping:
            action()

    def _outer_of(self, loader: int) -> CurrentBatch | None:
        """Return the batch of the loop that a loop has run in, as validation does, if that one is not over."""
        outer = self._outer.pop(loader, None)
        return outer if outer is not None and self.in_use.get(outer.loader) is outer else None

    def set_reading(self, what: Literal["", "samples", "batches"]) -> Literal["", "samples", "batches"]:
        """Set what a loader reads from now on; return what it read before."""
        before, self.reads = self.reads, what
        return before

    def on_take(self, action: Callable[[CurrentBatch], None]) -> None:
        """Call ``action`` for each batch that a loader is about to yield."""
        self._taking.append(action)

    def forget_on_take(self, action: Callable[[CurrentBatch], None]) -> None:
        """Call an action of :meth:`on_take` no more."""
        self._taking.remove(action)

    def after_loop(self, action: Callable[[], None]) -> None:
        """Call ``action`` at the end of every loop over a loader that was not left early."""
        self._looping.append(action)


# -- whether ranks are at the same batch ---------------------------------------------------------------

_NUM_BATCHES = 2**20
_NUM_EPOCHS = 2**12
_NUM_LOADERS = 2**12


def batch_in_hand(batch: CurrentBatch | None) -> int:
    """Return a number for the batch of a loop, at least 1; 0 if it is not this thread's, or of no loader of rankwise.

    Ranks compare it: a rank that skips a batch is a step ahead from then on, and every later gradient is a mean over
    different batches.
    """
    # A thread that reads ahead is at another batch than the one trained on.
    if batch is None or batch.thread != get_ident():
        return 0
    epoch = batch.epoch % _NUM_EPOCHS
    return 1 + batch.number % _NUM_BATCHES + _NUM_BATCHES * (epoch + _NUM_EPOCHS * (batch.loader % _NUM_LOADERS))


def check_same_batch(reported: Sequence[float], model_name: str, *, are_all_ranks: bool) -> None:
    """Raise if ranks are at different batches of one loader.

    Called by: every rank, with the same.

    Args:
        reported: for each rank, the value of :func:`batch_in_hand` there.
        model_name: for the error.
        are_all_ranks: whether the model has a copy on every rank of the world.

    Raises:
        CollectiveMismatch: names the ranks that are ahead.
    """
    batches = {rank: _batch_of(round(number)) for rank, number in enumerate(reported) if round(number)}
    # A loader that only some ranks iterate, as one for validation, tells nothing about the others.
    if len({loader for loader, _, _ in batches.values()}) != 1 or len(set(batches.values())) == 1:
        return
    behind = min(batches.values())
    ahead = [rank for rank, batch in batches.items() if batch != behind]
    # If ranks are laid out along axes, those with a copy have numbers of their own.
    among = "" if are_all_ranks else f" of the {len(reported)} along dp_replicate"
    raise CollectiveMismatch(
        f"{fold_ranks(ahead)}{among} did not run backward for batch {behind[2]} of epoch {behind[1]}, which "
        f"other ranks now run: gradients of {model_name} would be averaged over different batches.",
        evidence=fold_values(
            {rank: f"batch {number} of epoch {epoch}" for rank, (_, epoch, number) in batches.items()}
        ),
        do="skip a step or leave a loop on all ranks or on none: decide from rankwise.mean(loss, len(x)), which "
        "is the same on every rank and ignores ranks without samples; decide from a gradient norm after "
        "backward(), when it is the same on every rank",
    )


def _batch_of(number: int) -> tuple[int, int, int]:
    """Return the loader, the epoch, and the global batch in it."""
    rest, batch = divmod(number - 1, _NUM_BATCHES)
    loader, epoch = divmod(rest, _NUM_EPOCHS)
    return loader, epoch, batch
