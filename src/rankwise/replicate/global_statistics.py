# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation over the elements of several ranks: the report of each rank, and the result.

The caller exchanges the reports. Used by batchnorm, and by SyncBatchNorm of Horovod.
Legend: C channels, M elements per channel of all ranks.

Source: statistics are combined as in Chan, Golub, LeVeque (1979), eq. 2.1, in rank order; backward is that of Ioffe and
    Szegedy (arXiv:1502.03167), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from rankwise.torch_private.modules import BatchNorm


class StatisticsRanks(Protocol):
    """The ranks whose batches are normalised together."""

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return [ranks, 2C + 1], the ``own`` of every rank. Called by: every rank, in forward."""
        ...

    def mean_sums(
        self, own: torch.Tensor, x: torch.Tensor, count: torch.Tensor, *, is_needed: bool
    ) -> torch.Tensor | None:
        """Return the sum [2, C] over ranks of ``own``, divided by M. Called by: every rank, in backward.

        Args:
            own: the result of :func:`sums`.
            x: this rank's input.
            count: M.
            is_needed: whether the result is used.
        """
        ...


def normalised(layer: BatchNorm, x: torch.Tensor, ranks: StatisticsRanks) -> torch.Tensor:
    """Return a BatchNorm layer's output for ``x`` by the statistics of all ranks, and move its running statistics.

    Called by: every rank of ``ranks``.
    """
    output, mean, variance, count = _Normalised.apply(x, layer.weight, layer.bias, layer.eps, ranks)
    if layer.training and layer.track_running_stats:
        _track(layer, mean, variance, count)
    return output  # type: ignore[no-any-return]


@torch.no_grad()
def _track(layer: BatchNorm, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
    """Move the running statistics as torch's BatchNorm does, with the unbiased variance."""
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    momentum = layer.momentum
    if momentum is None:
        momentum = _share_of_latest(layer.num_batches_tracked, mean)  # type: ignore[arg-type]
    unbiased = variance * (count / (count - 1).clamp(min=1))
    # By data, as torch's own kernel does: a graph of an earlier call may hold the statistics, and does not read them.
    if layer.running_mean is not None:
        layer.running_mean.data.lerp_(mean.to(layer.running_mean.dtype), momentum)
    if layer.running_var is not None:
        layer.running_var.data.lerp_(unbiased.to(layer.running_var.dtype), momentum)


def _share_of_latest(num_batches: torch.Tensor, mean: torch.Tensor) -> float | torch.Tensor:
    """Return the weight of the latest batch in a plain mean over all; on a device as a tensor, which is not read."""
    return 1.0 / float(num_batches) if num_batches.device.type == "cpu" else mean.new_ones(()) / num_batches


class _Normalised(torch.autograd.Function):
    """Normalisation by all ranks' mean and variance."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes positions
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        ranks: StatisticsRanks,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, variance, count = combined(ranks.gather(statistics_of(wide(x))), _num_elements(x))
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.ranks = ranks
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return normalise(x, mean, inverse, weight, bias), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator loses the name
        ctx: Any,
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        own = sums(x, gradients[0], mean, inverse)
        is_needed = ctx.needs_input_grad[0]
        means = ctx.ranks.mean_sums(own, x, count, is_needed=is_needed)
        dx = gradient(x, gradients[0], mean, inverse, weight=weight, means=means) if is_needed else None
        d_weight = None if weight is None else own[1].to(weight.dtype)
        d_bias = None if ctx.bias_dtype is None else own[0].to(ctx.bias_dtype)
        return dx, d_weight, d_bias, None, None


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in the dtype that statistics are computed in."""
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def statistics_of(x: torch.Tensor) -> torch.Tensor:
    """Return [2C + 1], a rank's report of its elements [N, C, ...]: means, squared deviations, and their number."""
    num_channels = x.shape[1]
    num_elements = _num_elements(x)
    if num_elements:
        # As torch's BatchNorm computes them, in a third of the time of torch.var_mean.
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    else:
        variance = mean = x.new_zeros(num_channels)
    return torch.cat([mean, variance * num_elements, x.new_full((1,), num_elements)])


def _num_elements(x: torch.Tensor) -> int:
    return x.numel() // x.shape[1] if x.numel() else 0


def combined(rows: torch.Tensor, num_own: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean [C], biased variance [C] and M from the ranks' reports, [ranks, 2C + 1].

    Args:
        rows: the reports.
        num_own: this rank's elements per channel: if they are enough, M is not read from a device.

    Raises:
        ValueError: M is less than two.
    """
    num_channels = rows.shape[1] // 2
    means, squares, counts = rows.split([num_channels, num_channels, 1], dim=1)
    total = counts.sum()
    if (num_own <= 1 or rows.device.type == "cpu") and total <= 1:
        raise ValueError(
            f"BatchNorm needs more than one value per channel for training; all ranks together have {int(total)}"
        )
    mean = (means * counts).sum(0) / total
    squares = (squares + counts * (means - mean) ** 2).sum(0)
    return mean, squares / total, total


def normalise(
    x: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the output, in the dtype of ``x``; ``inverse`` [C] is that of the standard deviation."""
    scale = _scale(inverse, weight)
    shift = -mean * scale if bias is None else bias.to(mean.dtype) - mean * scale
    return torch.addcmul(_along(shift, x), x.to(mean.dtype), _along(scale, x)).to(x.dtype)


def sums(x: torch.Tensor, dy: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return [2, C], this rank's sums of ``dy`` and of ``dy`` times the normalised input."""
    if not x.numel():
        return mean.new_zeros((2, len(mean)))
    # In evaluation torch's BatchNorm takes the statistics that it is given; here they are those of all ranks.
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        dy.to(mean.dtype), x.to(mean.dtype), None, mean, inverse**-2, None, None, False, 0.0, [False, True, True]
    )
    return torch.stack([of_bias, of_weight])


def gradient(
    x: torch.Tensor,
    dy: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    *,
    weight: torch.Tensor | None,
    means: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of ``x``, from the means [2, C] of the results of :func:`sums`."""
    scale = _scale(inverse, weight)
    slope = -means[1] * inverse * scale
    shift = -means[0] * scale - slope * mean
    dx = torch.addcmul(_along(shift, x), x.to(mean.dtype), _along(slope, x))
    return dx.addcmul_(dy.to(mean.dtype), _along(scale, x)).to(x.dtype)


def _scale(inverse: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return inverse if weight is None else inverse * weight.to(inverse.dtype)


def _along(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return [C] as a view that broadcasts along the channel dimension of ``x``."""
    return values.view(1, -1, *([1] * (x.ndim - 2)))
