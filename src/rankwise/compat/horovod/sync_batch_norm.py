# SPDX-License-Identifier: Apache-2.0
"""``SyncBatchNorm``: BatchNorm with the statistics of all ranks' batches, on any device.

Legend: C channels, m elements per channel on this rank, M on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from rankwise.compat.horovod.ops import allgather, allreduce
from rankwise.compat.horovod.reduce_ops import Sum
from rankwise.compat.horovod.world import size


class SyncBatchNorm(_BatchNorm):
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

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's own name
        if input.dim() < 2:  # noqa: PLR2004 - batch and channels
            raise ValueError(f"expected an input of at least 2 dimensions, not {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """Return the normalised input.

        Called by: every rank, in training; in evaluation nothing is sent.
        """
        self._check_input_dim(input)
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
    """Forward and backward of Ioffe and Szegedy (arXiv:1502.03167), section 3, with sums over all ranks.

    Statistics of the ranks are combined as in Chan, Golub, LeVeque (1979), eq. 2.1, in rank order.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        mean, variance, count = _statistics(wide)
        inverse = torch.rsqrt(variance + eps)
        scale = inverse if weight is None else inverse * weight.to(wide.dtype)
        shift = -mean * scale if bias is None else bias.to(wide.dtype) - mean * scale
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return torch.addcmul(_along(shift, x), wide, _along(scale, x)).to(x.dtype), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator loses the name
        ctx: Any,  # noqa: ANN401 - autograd's context
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        dy = gradients[0].to(mean.dtype)
        normalised = (x.to(mean.dtype) - _along(mean, x)) * _along(inverse, x)
        dims = [dim for dim in range(x.ndim) if dim != 1]
        own = torch.stack([dy.sum(dims), (dy * normalised).sum(dims)])
        dx = None
        if ctx.needs_input_grad[0]:
            shared = allreduce(own, op=Sum, name="sync_batch_norm.gradients") / count
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            dx = dy - _along(shared[0], x) - normalised * _along(shared[1], x)
            dx = (dx * _along(scale, x)).to(x.dtype)
        d_weight = None if weight is None else own[1].to(weight.dtype)
        d_bias = None if ctx.bias_dtype is None else own[0].to(ctx.bias_dtype)
        return dx, d_weight, d_bias, None


def _statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean [C], biased variance [C] and M of the elements of all ranks."""
    num_channels = x.shape[1]
    num_elements = x.numel() // num_channels
    if num_elements:
        variance, mean = torch.var_mean(x, [dim for dim in range(x.ndim) if dim != 1], correction=0)
    else:
        variance = mean = x.new_zeros(num_channels)
    own = torch.cat([mean, variance * num_elements, x.new_tensor([num_elements])])
    rows = allgather(own.unsqueeze(0), name="sync_batch_norm.statistics")
    means, squares, counts = rows.split([num_channels, num_channels, 1], dim=1)
    total = counts.sum()
    if total <= 1:
        raise ValueError(f"BatchNorm needs more than one value per channel to train, and all ranks have {int(total)}")
    mean = (means * counts).sum(0) / total
    squares = (squares + counts * (means - mean) ** 2).sum(0)
    return mean, squares / total, total


def _along(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return [C] as a view that broadcasts along the channel dimension of ``x``."""
    return values.view(1, -1, *([1] * (x.ndim - 2)))
