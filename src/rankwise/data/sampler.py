# SPDX-License-Identifier: Apache-2.0
"""The order of each epoch and a saved position in it, for the loader; and ``ShardedSampler``, for the user's own.

Reads no sample.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from rankwise.comm.agreement import all_ranks_succeed
from rankwise.comm.session import current
from rankwise.data.epoch_order import Permutation
from rankwise.data.same_data import check_same_order, check_with_peers, prober_in_memory
from rankwise.data.sampler_order import SAME_DRAWS, GivenBatches, GivenOrder, check_order
from rankwise.data.shards import EpochCursor, Shards, State, check_not_empty, local_batches, make_shards, place_in
from rankwise.data.sources import length_of
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sized

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


class ShardedSampler(EpochPosition, Sampler[list[int]]):
    """The order and shares of :class:`rankwise.DataLoader`, for torch's or MONAI's loader.

    Pass it as ``batch_sampler=``. It yields this rank's indices of each global batch, and tracks its
    epoch: each iteration that reaches its end is followed by the next epoch's order, without
    ``set_epoch``. ::

        loader = torch.utils.data.DataLoader(dataset, batch_sampler=rw.ShardedSampler(dataset,
        global_batch_size=64))

    With ``remainder="keep"`` the last list of an epoch may be shorter, and empty on some ranks if
    fewer samples than ranks are left. torch's default collate function fails on an empty list: use
    ``remainder="drop"``, a collate function that handles it, or ``rankwise.DataLoader``,
    which does.

    An iteration left early (``break``) ends the epoch, unless it was left after one batch; see
    :class:`rankwise.DataLoader`.

    Called by: every rank, unless ``rank`` and ``world_size`` are given.

    Args:
        dataset: the dataset, or its length.
        global_batch_size: samples per step of all ranks together. Exactly one of the two sizes.
        local_batch_size: samples per step of each rank.
        shuffle: another random order each epoch, a pure function of ``(seed, epoch)``. Default: without ``sampler``.
        sampler: the order of an epoch for all ranks together; see :class:`rankwise.DataLoader`.
        seed: any integer, the same on every rank.
        remainder: ``"keep"`` or ``"drop"`` the last global batch of an epoch if it is short.
        rank: number of this rank; default: of the joined world.
        world_size: number of ranks; default: of the joined world.
        compare_samples: whether the joined ranks compare the dataset's indices and file names, and rows of tensors and
            arrays. Other samples are not read: only the loader knows how.

    Raises:
        ConfigurationError: invalid or contradictory arguments, or arguments that differ between ranks.
        DatasetError: the dataset is empty or not the same on every rank. While iterating: ``sampler`` gave the ranks
            different orders.
        NotJoined: there is no world and ``rank`` and ``world_size`` are not given.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        global_batch_size: int | None = None,
        local_batch_size: int | None = None,
        shuffle: bool | None = None,
        sampler: Iterable[int] | None = None,
        seed: int = 0,
        remainder: str = "keep",
        rank: int | None = None,
        world_size: int | None = None,
        compare_samples: bool = True,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise ConfigurationError(
                "rank and world_size must be given together.",
                evidence=f"rank={rank}, world_size={world_size}",
                do="pass both, or neither to use those of the joined world",
            )
        joined = rank is None or world_size is None
        self._number = 0
        if rank is None or world_size is None:
            rank, world_size = current().data_rank("a ShardedSampler")
            self._number = current().new_loader()
        with all_ranks_succeed("ShardedSampler") if joined else nullcontext():
            check_order(dataset, is_stream=False, seed=seed, shuffle=shuffle or False, sampler=sampler)
            self._length = dataset if isinstance(dataset, int) else length_of(dataset)
            self._given = None if sampler is None else GivenOrder(sampler, self._length, seed)
            self._shards = make_shards(
                self._length if self._given is None else len(self._given),
                global_batch_size=global_batch_size,
                local_batch_size=local_batch_size,
                remainder=remainder,
                rank=rank,
                world_size=world_size,
            )
        self.seed = seed
        self.shuffle = sampler is None if shuffle is None else shuffle
        self._cursor = EpochCursor()
        self._began = (0, 0)
        if joined:
            prober = None
            if compare_samples and not isinstance(dataset, int):
                prober = prober_in_memory(dataset, str(current().world))
            settings = self._compared_facts(compare_samples=compare_samples)
            check_with_peers(settings, dataset if compare_samples else None, prober)
        else:
            check_not_empty(self._length)

    def __len__(self) -> int:
        """Return the number of global batches of a whole epoch, the same on every rank."""
        return self._shards.num_batches()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices of each global batch, from the loaded position, else from 0."""
        iteration = self._cursor.begin()
        self._began = epoch, start = self._cursor.epoch, self._cursor.start
        order = self._order(epoch)
        self._continue()
        for batch in local_batches(self._shards, order, epoch, start):
            self._cursor.advance(iteration, batch.stop)
            yield batch.indices.tolist()
        self._cursor.finish(iteration)

    def state_dict(self, *, num_batches: int | None = None) -> State:
        """Return the epoch and position, JSON-able, the same on every rank.

        Args:
            num_batches: how many batches the training loop has taken in the current iteration.
                Required if the loader has workers: it then requests batches ahead of the loop, and
                the sampler sees only the requests.
        """
        return self._state_at(*(self._cursor.place() if num_batches is None else self._place_after(num_batches)))

    def _place_after(self, num_batches: int) -> tuple[int, int]:
        epoch, start = self._began
        if not 0 <= num_batches <= self._shards.num_batches(start):
            raise ConfigurationError(
                f"This iteration does not have {num_batches} batches.",
                evidence=f"it began at sample {start} and has {self._shards.num_batches(start)} global batches",
                do="pass how many batches the loop has taken since this `for` began",
            )
        return epoch, min(start + num_batches * self._shards.global_batch_size, self._shards.stop(start))
