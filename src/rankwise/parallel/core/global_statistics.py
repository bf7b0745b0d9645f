# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation over the elements of several ranks, as values: what each tells, and what that comes to.

Used by batchnorm, and by other libraries' words for it. Legend: C channels, M elements per channel of all ranks.

Source: statistics are combined as in Chan, Golub, LeVeque (1979), eq. 2.1, in rank order; backward is that of Ioffe and
    Szegedy (arXiv:1502.03167), section 3.
"""

from __future__ import annotations

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in the dtype that statistics are computed in."""
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def statistics_of(x: torch.Tensor) -> torch.Tensor:
    """Return [2C + 1], what a rank tells of its elements [N, C, ...]: means, squared deviations, and how many."""
    num_channels = x.shape[1]
    num_elements = x.numel() // num_channels if x.numel() else 0
    if num_elements:
        variance, mean = torch.var_mean(x, _all_but_channels(x), correction=0)
    else:
        variance = mean = x.new_zeros(num_channels)
    return torch.cat([mean, variance * num_elements, x.new_tensor([num_elements])])


def combined(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean [C], biased variance [C] and M from what the ranks have told, [ranks, 2C + 1].

    Raises:
        ValueError: M is less than two.
    """
    num_channels = rows.shape[1] // 2
    means, squares, counts = rows.split([num_channels, num_channels, 1], dim=1)
    total = counts.sum()
    if total <= 1:
        raise ValueError(f"BatchNorm needs more than one value per channel to train, and all ranks have {int(total)}")
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
    dims = _all_but_channels(x)
    dy = dy.to(mean.dtype)
    return torch.stack([dy.sum(dims), (dy * _normalised(x, mean, inverse)).sum(dims)])


def gradient(
    x: torch.Tensor,
    dy: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    *,
    weight: torch.Tensor | None,
    means: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of ``x``, from the means [2, C] of what :func:`sums` adds up."""
    dx = dy.to(mean.dtype) - _along(means[0], x) - _normalised(x, mean, inverse) * _along(means[1], x)
    return (dx * _along(_scale(inverse, weight), x)).to(x.dtype)


def _scale(inverse: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return inverse if weight is None else inverse * weight.to(inverse.dtype)


def _normalised(x: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return (x.to(mean.dtype) - _along(mean, x)) * _along(inverse, x)


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _along(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return [C] as a view that broadcasts along the channel dimension of ``x``."""
    return values.view(1, -1, *([1] * (x.ndim - 2)))
