# SPDX-License-Identifier: Apache-2.0
"""``SyncBatchNorm``: BatchNorm with the statistics of all ranks' batches, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from rankwise.compat.horovod.initialization import size
from rankwise.compat.horovod.operations.gathering import allgather
from rankwise.compat.horovod.operations.reducing import allreduce
from rankwise.compat.horovod.reduce_ops import Sum
from rankwise.parallel.core import global_statistics
from rankwise.torch_private.modules import AnySizeBatchNorm, check_input_dim


class SyncBatchNorm(AnySizeBatchNorm):
    """Normalise by the mean and variance of all ranks' elements; while it trains, every rank has to call it.

    The ranks' batches may differ in size. Its gradients are those of the sum of the ranks' losses.

    Args:
        num_features: C, of inputs [batch, C, ...].
        eps: is added to the variance.
        momentum: of the running statistics; ``None`` for their plain mean over steps.
        affine: whether there are a weight and a bias to learn.
        track_running_stats: whether there are running statistics, for evaluation.
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
        """Return the normalised input.

        Called by: every rank, in training; in evaluation nothing is sent.
        """
        check_input_dim(self, input)
        if not self.training and self.track_running_stats:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        if size() == 1:
            return super().forward(input)
        output, mean, variance, count = _Normalised.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats:
            self._track(mean, variance, count)
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        """Move the running statistics as torch's BatchNorm does, with the unbiased variance."""
        if self.num_batches_tracked is None or self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Normalised(torch.autograd.Function):
    """Normalisation by the statistics of all ranks; see :mod:`rankwise.parallel.core.global_statistics`."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        own = global_statistics.statistics_of(global_statistics.wide(x))
        rows = allgather(own.unsqueeze(0), name="sync_batch_norm.statistics")
        mean, variance, count = global_statistics.combined(rows)
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return global_statistics.normalise(x, mean, inverse, weight, bias), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator loses the name
        ctx: Any,  # noqa: ANN401 - autograd's context
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        own = global_statistics.sums(x, gradients[0], mean, inverse)
        dx = None
        if ctx.needs_input_grad[0]:
            means = allreduce(own, op=Sum, name="sync_batch_norm.gradients") / count
            dx = global_statistics.gradient(x, gradients[0], mean, inverse, weight=weight, means=means)
        d_weight = None if weight is None else own[1].to(weight.dtype)
        d_bias = None if ctx.bias_dtype is None else own[0].to(ctx.bias_dtype)
        return dx, d_weight, d_bias, None
