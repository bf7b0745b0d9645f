# SPDX-License-Identifier: Apache-2.0
"""What a loader and a sampler share: the order of each epoch, and a position in it that is saved and loaded.

Imported by ``loader`` and ``sampler``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.data.epoch_order import order_of_epoch
from rankwise.data.sampler_order import GivenOrder, shared_order
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

    def _state_at(self, epoch: int, position: int) -> State:
        order: State = {} if self._given is None else self._given.facts(epoch)
        return self._facts() | order | {"epoch": epoch, "position": position}

    def _facts(self) -> State:
        """Return the settings that determine the order."""
        facts: State = {"dataset_length": self._length, "seed": self.seed, "shuffle": self.shuffle}
        return facts if self._given is None else facts | {"sampler_length": len(self._given)}

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        """Return the function from positions of an epoch to indices of the dataset."""
        if self._given is None:
            return order_of_epoch(self._shards.length, shuffle=self.shuffle, seed=self.seed, epoch=epoch)
        return shared_order(self._given, epoch, self._number or None)
