# SPDX-License-Identifier: Apache-2.0
"""The losses of the tests of loss weights: as public training scripts write them, each of outputs, targets, inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """Of outputs [batch, 4], targets [batch, 4] and inputs [batch, 3]."""

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=torch.float64)


def labels(target: torch.Tensor) -> torch.Tensor:
    """Return classes [batch] from targets [batch, 4]."""
    return target[:, 0].abs().mul(3).long() % 4


def kept(target: torch.Tensor) -> torch.Tensor:
    """Return a mask [batch, 4] that leaves few elements, and none of some samples."""
    return target > 0.8


def _gaussian(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return functional.gaussian_nll_loss(o[:, :2], t[:, :2], functional.softplus(o[:, 2:]) + 0.1)


def _triplet(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return functional.triplet_margin_loss(o, t, t.flip(1))


def _focal(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    logs = functional.log_softmax(o, 1).gather(1, labels(t)[:, None])
    return -((1 - logs.exp()) ** 2 * logs).mean()


def _vae(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    mean, log_variance = o[:, :2], o[:, 2:]
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return functional.binary_cross_entropy_with_logits(o, t.sigmoid(), reduction="sum") + divergence


def _masked(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    mask = kept(t)
    return ((o - t) ** 2 * mask).sum() / mask.sum().clamp_min(1)


def _masked_by_where(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    mask = kept(t)
    return torch.where(mask, (o - t) ** 2, 0.0).sum() / mask.sum().clamp_min(1)


def _of_single_samples(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    overlap = (o.sigmoid() * (t > 0)).sum(1)
    return (1 - 2 * overlap / (o.sigmoid().sum(1) + (t > 0).sum(1) + 1)).mean()


def _mean_of_classes(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    losses, zeros = (o - t).square().mean(1), o.new_zeros(4)
    counts = zeros.scatter_add(0, labels(t), torch.ones_like(losses))
    return (zeros.scatter_add(0, labels(t), losses) / counts.clamp_min(1)).mean()


MEANS: dict[str, Loss] = {
    "mse": lambda o, t, _: functional.mse_loss(o, t),
    "l1": lambda o, t, _: functional.l1_loss(o, t),
    "smooth_l1": lambda o, t, _: functional.smooth_l1_loss(o, t),
    "huber": lambda o, t, _: functional.huber_loss(o, t),
    "cross_entropy": lambda o, t, _: functional.cross_entropy(o, labels(t)),
    "class_weights": lambda o, t, _: functional.cross_entropy(o, labels(t), weight=CLASS_WEIGHTS),
    "ignore_index": lambda o, t, _: functional.cross_entropy(o, labels(t), ignore_index=1),
    "label_smoothing": lambda o, t, _: functional.cross_entropy(o, labels(t), label_smoothing=0.1),
    "label_smoothing_with_class_weights": lambda o, t, _: functional.cross_entropy(
        o, labels(t), weight=CLASS_WEIGHTS, label_smoothing=0.1, ignore_index=2
    ),
    "probability_targets": lambda o, t, _: functional.cross_entropy(o, t.softmax(1)),
    "nll_with_class_weights": lambda o, t, _: functional.nll_loss(o.log_softmax(1), labels(t), weight=CLASS_WEIGHTS),
    "bce": lambda o, t, _: functional.binary_cross_entropy(o.sigmoid(), t.sigmoid()),
    "bce_with_weight": lambda o, t, _: functional.binary_cross_entropy(o.sigmoid(), t.sigmoid(), weight=CLASS_WEIGHTS),
    "bce_with_pos_weight": lambda o, t, _: functional.binary_cross_entropy_with_logits(
        o, t.sigmoid(), pos_weight=CLASS_WEIGHTS
    ),
    "multi_margin_with_weight": lambda o, t, _: functional.multi_margin_loss(o, labels(t), weight=CLASS_WEIGHTS),
    "kl_batchmean": lambda o, t, _: functional.kl_div(o.log_softmax(1), t.softmax(1), reduction="batchmean"),
    "gaussian_nll": lambda o, t, _: _gaussian(o, t),
    "poisson_nll": lambda o, t, _: functional.poisson_nll_loss(o, t.abs()),
    "cosine_embedding": lambda o, t, _: functional.cosine_embedding_loss(o, t, t[:, 0].sign()),
    "triplet": lambda o, t, _: _triplet(o, t),
    "focal": lambda o, t, _: _focal(o, t),
    "hinge": lambda o, t, _: functional.relu(1 - t.sign() * o).mean(),
    "not_reduced_then_mean": lambda o, t, _: functional.cross_entropy(o, labels(t), reduction="none").mean(),
    "weighted_samples": lambda o, t, x: (functional.mse_loss(o, t, reduction="none").mean(1) * x[:, 0].abs()).mean(),
    "gather_then_mean": lambda o, t, _: -o.log_softmax(1).gather(1, labels(t)[:, None]).squeeze(1).mean(),
    "sum_then_mean": lambda o, t, _: ((o - t) ** 2).sum(1).mean(),
    "mean_then_mean": lambda o, t, _: ((o - t) ** 2).mean(1).mean(0),
    "mean_then_sum": lambda o, t, _: ((o - t) ** 2).mean(0).sum(),
    "sequence_first": lambda o, t, _: (o.T - t.T).abs().mean(),
    "power_mean": lambda o, t, _: (o - t).pow(2).mean().mul(0.5),
    "negated": lambda o, t, _: -(o * t).mean(),
    "divided_by_accumulation": lambda o, t, _: functional.mse_loss(o, t) / 4,
    "scaled_by_a_tensor": lambda o, t, _: functional.mse_loss(o, t) * torch.tensor(1024.0, dtype=torch.float64),
    "masked": lambda o, t, _: _masked(o, t),
    "masked_by_index": lambda o, t, _: ((o - t) ** 2)[kept(t)].mean(),
    "masked_by_where": lambda o, t, _: _masked_by_where(o, t),
    "sum_over_its_samples": lambda o, t, x: ((o - t) ** 2).sum() / len(x),
    "sum_of_tokens_over_samples": lambda o, t, x: (
        functional.mse_loss(o.reshape(-1), t.reshape(-1), reduction="sum") / len(x)
    ),
    "sum_over_its_elements": lambda o, t, _: ((o - t) ** 2).sum() / t.numel(),
    "dice_of_each_sample": lambda o, t, _: _of_single_samples(o, t),
    "rmse_of_each_sample": lambda o, t, _: (((o - t) ** 2).mean(1) + 1e-6).sqrt().mean(),
}
"""Means over samples, elements, or what is not masked."""

SUMS: dict[str, Loss] = {
    "sum": lambda o, t, _: ((o - t) ** 2).sum(),
    "mse_sum": lambda o, t, _: functional.mse_loss(o, t, reduction="sum"),
    "cross_entropy_sum": lambda o, t, _: functional.cross_entropy(o, labels(t), weight=CLASS_WEIGHTS, reduction="sum"),
    "mean_of_each_sample_then_sum": lambda o, t, _: ((o - t) ** 2).mean(1).sum(0),
    "sum_over_a_constant": lambda o, t, _: ((o - t) ** 2).sum() / 100.0,
    "sum_over_variances": lambda o, t, _: (((o - t) ** 2).sum(0) / CLASS_WEIGHTS).sum(),
    "half_a_sum": lambda o, t, _: 0.5 * ((o - t) ** 2).sum(),
    "vae": lambda o, t, _: _vae(o, t),
}
"""Sums, as many autoencoders have them."""

SEVERAL: dict[str, Loss] = {
    "two_means": lambda o, t, _: functional.mse_loss(o, t) + 0.1 * functional.l1_loss(o, t),
    "means_over_unlike_numbers": lambda o, t, _: (
        functional.cross_entropy(o, labels(t), weight=CLASS_WEIGHTS) + 0.1 * functional.mse_loss(o, t)
    ),
    "mean_and_sum": lambda o, t, _: functional.mse_loss(o, t) + 0.01 * o.pow(2).sum(),
    "mean_and_masked": lambda o, t, _: functional.cross_entropy(o, labels(t)) + _masked(o, t),
    "parts_over_samples": lambda o, t, x: (o[t[:, 0] > 0].abs().sum() + 2 * o[t[:, 0] <= 0].abs().sum()) / len(x),
    "stacked": lambda o, t, _: torch.stack([functional.mse_loss(o, t), _masked(o, t), functional.l1_loss(o, t)]).mean(),
    "python_sum": lambda o, t, _: sum(
        [functional.mse_loss(o, t), 2 * _masked(o, t), functional.mse_loss(o, t, reduction="sum")]
    ),
}
"""Several terms."""

EXACT = MEANS | SUMS | SEVERAL


class _Doubled(torch.autograd.Function):
    """Whose backward is written in Python, so that its forward can be anything."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        del ctx
        return gradient * 2


COUPLED: dict[str, tuple[Loss, str]] = {
    "rmse": (lambda o, t, _: functional.mse_loss(o, t).sqrt(), "Sqrt"),
    "dice_of_the_batch": (
        lambda o, t, _: 1 - 2 * (o.sigmoid() * (t > 0)).sum() / (o.sigmoid().sum() + (t > 0).sum()),
        "Div of two reductions",
    ),
    "contrastive": (
        lambda o, t, _: functional.cross_entropy(
            functional.normalize(o) @ functional.normalize(o).T, torch.arange(len(o))
        ),
        "Mm of two outputs",
    ),
    "every_pair": (
        lambda o, t, _: functional.softplus(o[t[:, 0] < 0, 0][:, None] - o[t[:, 0] >= 0, 0][None]).mean(),
        "Sub of every pair of samples",
    ),
    "every_pair_by_fewer_dims": (
        lambda o, t, _: functional.softplus(o[t[:, 0] >= 0, 0] - o[t[:, 0] < 0, 0].unsqueeze(-1)).mean(),
        "Sub of every pair of samples",
    ),
    "sums_of_classes": (lambda o, t, _: ((t > 0).to(o.dtype).T @ o).square().mean(), "Mm over the first dim"),
    "products_of_columns": (lambda o, t, _: (o.T @ t).square().mean(), "Mm over the first dim"),
    "softmax_over_the_batch": (lambda o, t, _: (o.softmax(0) * t).sum(), "Softmax over the first dim"),
    "variance_of_the_batch": (lambda o, t, _: o.var(0).mean(), "Var over the first dim"),
    "log_of_a_mean": (lambda o, t, _: functional.mse_loss(o, t).log(), "Log"),
    "function_of_python": (lambda o, t, _: functional.mse_loss(_Doubled.apply(o), t), "_Doubled"),  # type: ignore[no-untyped-call, arg-type]
    "mean_of_each_output_over_what_is_kept": (
        lambda o, t, _: ((o * kept(t)).sum(0) / kept(t).sum(0).clamp_min(1)).mean(),
        "Div of a sum by counts",
    ),
    "mean_of_each_class": (lambda o, t, _: _mean_of_classes(o, t), "ScatterAdd over the first dim"),
    "sums_of_classes_of_a_loss": (
        lambda o, t, _: ((t > 0).to(o.dtype).T @ (o - t).square().mean(1)).square().mean(),
        "Mv over the first dim",
    ),
    "maximum": (lambda o, t, _: (o - t).abs().max(), "Max"),
}
"""What samples are coupled in; with the operation that does it."""
