# SPDX-License-Identifier: Apache-2.0
"""``SyncBatchNorm``: BatchNorm with the statistics of all ranks' batches, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from rankwise.compat.horovod.collectives import allgather
from rankwise.compat.horovod.initialization import size
from rankwise.compat.horovod.reducing import allreduce
from rankwise.compat.horovod.request import Sum
from rankwise.replicate import global_statistics
from rankwise.torch_private.modules import AnySizeBatchNorm, check_input_dim

if TYPE_CHECKING:
    import torch


class SyncBatchNorm(AnySizeBatchNorm):
    """Normalize by the mean and variance of all ranks' elements; in training, every rank must call it.

    The ranks' batches may differ in size. Its gradients are those of the sum of the ranks' losses.

    Args:
        num_features: C, of inputs [batch, C, ...].
        eps: is added to the variance.
        momentum: of the running statistics; ``None`` for their plain mean over steps.
        affine: whether it has a weight and a bias.
        track_running_stats: whether it has running statistics, for evaluation.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,  # noqa: FBT001, FBT002 - torch's own
        track_running_stats: bool = True,  # noqa: FBT001, FBT002 - torch's own
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """Return the normalized input.

        Called by: every rank, in training; in evaluation nothing is sent.
        """
        check_input_dim(self, input)
        if not self.training and self.track_running_stats:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        if size() == 1:
            return super().forward(input)
        return global_statistics.normalised(self, input, _HorovodRanks())


class _HorovodRanks:
    """All ranks of ``hvd.init()``; see :class:`rankwise.replicate.global_statistics.StatisticsRanks`."""

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return allgather(own.unsqueeze(0), name="sync_batch_norm.statistics")

    def mean_sums(
        self, own: torch.Tensor, x: torch.Tensor, count: torch.Tensor, *, is_needed: bool
    ) -> torch.Tensor | None:
        del x
        return allreduce(own, op=Sum, name="sync_batch_norm.gradients") / count if is_needed else None
