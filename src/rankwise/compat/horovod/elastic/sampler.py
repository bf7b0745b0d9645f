# SPDX-License-Identifier: Apache-2.0
"""``ElasticSampler``: divides the remaining samples of an epoch among the current number of ranks."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from rankwise.compat.horovod.initialization import rank, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized


class ElasticSampler(Sampler[int]):
    """Divides a dataset among the ranks, and the remaining samples among the new ranks after a restart.

    The order of an epoch is that of Horovod's class of the same name for the same seed and number of ranks. Put the
    sampler into the :class:`TorchState`, call :meth:`record_batch` after each batch and :meth:`set_epoch` at the
    *end* of each epoch.

    Args:
        dataset: only its length is used, which must not change.
        shuffle: whether each epoch has another order.
        seed: of the order, the same on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:  # noqa: FBT001, FBT002 - Horovod's
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch ``epoch``, with no samples processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 - Horovod's argument
        """Record that every rank has processed a batch of ``batch_size`` samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, on the current ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples of the epoch among the current ranks."""
        self.num_replicas = size()
        self.rank = rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311 - an order, no secret
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Return this rank's samples; some are repeated so that all ranks have the same number."""
        enough = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return iter(list(enough)[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        """Return the number of samples of each rank."""
        return self.num_samples
