# SPDX-License-Identifier: Apache-2.0
"""The order of each epoch and a position in it that is saved and loaded: the part common to loader and sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.data.epoch_order import Permutation
from rankwise.data.same_data import check_same_order
from rankwise.data.sampler_order import SAME_DRAWS, GivenBatches, GivenOrder
from rankwise.data.shards import EpochCursor, Shards, State, place_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import numpy.typing as npt

    Indices = npt.NDArray[np.int64]


class EpochPosition:
    """The part of a loader or sampler that knows order and position. Their constructors set all of these."""

    seed: int
    shuffle: bool
    _length: int | None
    """Of the dataset; ``None`` if it is only known from iterating it."""
    _number: int
    """Of the loader, the same on every rank; 0 outside of a world."""
    _shards: Shards
    _given: GivenOrder | None
    """A sampler's order, if there is one."""
    _cursor: EpochCursor
    _when_resumed: Callable[[], object] | None = None

    @property
    def epoch(self) -> int:
        """The current epoch or, between iterations, the next one; from 0."""
        return self._cursor.epoch

    @property
    def is_in_loop(self) -> bool:
        """Whether a ``for`` over it has begun and not reached the end of its epoch."""
        return self._cursor.is_running

    def when_resumed(self, action: Callable[[], object]) -> None:
        """Call ``action`` once, when the next ``for`` continues from the loaded position."""
        self._when_resumed = action

    def _continue(self) -> None:
        """Call the action of :meth:`when_resumed`. Called by a ``for``, before its first step."""
        action, self._when_resumed = self._when_resumed, None
        if action is not None:
            action()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the next ``for`` where ``state`` was taken.

        The number of ranks and the batch size may differ.

        Raises:
            DatasetError: the dataset had another length.
            ConfigurationError: another seed or order, or not a state.
        """
        epoch, position = place_in(state, self._facts())
        if self._given is not None:
            self._given.expect(state)
        self._cursor.move_to(epoch, position)

    def _compared_facts(self, *, compare_samples: bool) -> State:
        """Return the settings that must be the same on every rank."""
        return self._facts() | {
            "global_batch_size": self._shards.global_batch_size,
            "remainder": self._shards.remainder,
            "compare_samples": compare_samples,
        }

    def _state_at(self, epoch: int, position: int) -> State:
        order: State = {} if self._given is None else self._given.facts(epoch)
        return self._facts() | order | {"epoch": epoch, "position": position}

    def _facts(self) -> State:
        """Return the settings that determine the order."""
        facts: State = {"dataset_length": self._length, "seed": self.seed, "shuffle": self.shuffle}
        return facts if self._given is None else facts | {"sampler_length": self._given.length}

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        """Return the function from positions of an epoch to indices of the dataset.

        Raises:
            DatasetError: the sampler yielded another order on another rank, or something that is not an order.
        """
        if self._given is not None:
            indices = self._given.of_epoch(epoch)
            if self._number:
                check_same_order(f"{self._number}/{epoch}", indices, do=SAME_DRAWS)
                if isinstance(self._given, GivenBatches):
                    ends = self._given.ends_of_epoch(epoch)
                    what = "The batch sampler gave the ranks batches that end elsewhere"
                    check_same_order(f"{self._number}/{epoch}/ends", ends, do=SAME_DRAWS, what=what)
            return indices.__getitem__
        return Permutation(self._shards.length, self.seed, epoch) if self.shuffle else (lambda positions: positions)
