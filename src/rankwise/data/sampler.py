# SPDX-License-Identifier: Apache-2.0
"""``ShardedSampler``: the order and shares of the loader, for the user's own loader. Reads no sample."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch.utils.data import Sampler

from rankwise.comm.agreement import all_ranks_succeed
from rankwise.comm.session import current
from rankwise.data.arguments import check_order
from rankwise.data.epoch_position import EpochPosition
from rankwise.data.probes import prober_in_memory
from rankwise.data.same_data import check_with_peers
from rankwise.data.sampler_order import GivenOrder
from rankwise.data.shards import EpochCursor, State, check_not_empty, local_batches, make_shards
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sized


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
            check_order(dataset, is_stream=False, shuffle=bool(shuffle), sampler=sampler)
            self._length = dataset if isinstance(dataset, int) else len(dataset)
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
            self._cursor.take(iteration, batch.stop)
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
