# SPDX-License-Identifier: Apache-2.0
"""Where in its epochs a training loop stands, and what of that goes into a checkpoint.

Knows no order and no dataset; a position counts samples of an epoch, taken by all ranks together,
so that it means the same on any number of ranks. Imported by ``sampler``, ``same_data``
and ``loader``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.errors import ConfigurationError, DatasetError, fold_values

if TYPE_CHECKING:
    from collections.abc import Mapping

State = dict[str, Any]


class EpochCursor:
    """The epoch and position of one loader or sampler.

    An epoch that was left early, by ``break`` or an error, is over: the next iteration begins the
    next epoch. Where only one batch had been taken, that was a look at the data: the next iteration
    begins where that one began.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.position = 0
        self.start = 0
        """Position at which the iteration under way began, or the next one will begin."""
        self._taken = 0
        self._iteration = 0

    def begin(self) -> int:
        """Begin an iteration at ``epoch`` and ``start``; return the mark its calls must show."""
        if self._taken > 1:
            self._turn_to(self.epoch + 1, 0)
        else:
            self._turn_to(self.epoch, self.start)
        self._iteration += 1
        return self._iteration

    def take(self, iteration: int, position: int) -> None:
        """Note that the loop takes the batch that ends at ``position``.

        An iteration that another one has followed counts no more.
        """
        if iteration == self._iteration:
            self.position = position
            self._taken += 1

    def finish(self, iteration: int) -> None:
        """Note that the loop came to the end of the epoch."""
        if iteration == self._iteration:
            self._turn_to(self.epoch + 1, 0)

    def move_to(self, epoch: int, position: int) -> None:
        """Have the next iteration begin at that place; one under way counts no more."""
        self._iteration += 1
        self._turn_to(epoch, position)

    def place(self) -> tuple[int, int]:
        """Return ``(epoch, position)`` to go on from.

        After the last batch that is the end of the epoch, not the next one: what the training loop does
        after its ``for`` (a scheduler's step, a validation) is still to come, and comes after a resume.
        """
        return self.epoch, self.position

    def _turn_to(self, epoch: int, position: int) -> None:
        self.epoch, self.start, self.position = epoch, position, position
        self._taken = 0


def place_in(state: Mapping[str, Any], facts: Mapping[str, object]) -> tuple[int, int]:
    """Return ``(epoch, position)`` of a saved state, after checking that its order is this one.

    Args:
        state: what ``state_dict`` returned: ``facts``, ``epoch`` and ``position``.
        facts: what decides the order now: ``dataset_length``, ``seed``, ``shuffle``; with a sampler ``sampler_length``.

    Raises:
        DatasetError: the dataset had another length.
        ConfigurationError: it was another order, or this is no such state.
    """
    missing = [name for name in ("epoch", "position", *facts) if name not in {*state, "sampler_length"}]
    if missing:
        raise ConfigurationError(
            "This is not the state of a loader or sampler: it lacks " + ", ".join(missing) + ".",
            evidence="it holds " + (", ".join(map(str, state)) or "nothing"),
            do="pass what state_dict() of a rankwise DataLoader or ShardedSampler returned",
        )
    for name in dict.fromkeys([*facts, "sampler_length"]):
        now = facts.get(name)
        if state.get(name) != now:
            kind = DatasetError if name == "dataset_length" else ConfigurationError
            raise kind(
                f"The state was saved with {name}={state.get(name)!r}, and now {name}={now!r}: "
                "its position means other samples in this order.",
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
            f"There is no position {position!r} of epoch {epoch!r}.",
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
            do="check the path or the filter the dataset was made with",
        )
