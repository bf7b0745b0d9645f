# SPDX-License-Identifier: Apache-2.0
"""The parameters that one server keeps: their updates, and what has changed after which. Sends nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rankwise.errors import ConfigurationError, fold_values
from rankwise.parameter_server.messages import TensorBuffer, TensorRows
from rankwise.torch_private.tensors import foreach_copy_, sparse_indices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from rankwise.comm.backends.mapping import Mapping

ROW_LOCAL = {
    "SGD": ("momentum", "weight_decay"),
    "Adagrad": ("weight_decay",),
    "SparseAdam": (),
}
"""Optimizers of torch that change only the rows of a sparse gradient, if these options are zero."""


class ParameterShard:
    """Parameters of one server, from the first update to the last.

    Args:
        parameters: those it keeps.
        optimizer: of the whole model.
        step: updates every parameter that has a gradient.
        mapping: memory from which workers of this host read what has changed; ``None`` if there is none.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        step: Callable[[], object],
        mapping: Mapping | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.num_updates = 0
        self.optimizer = optimizer
        self._step = step
        self._body = TensorBuffer(self.parameters, mapping)
        self._changed_at = [0] * len(self.parameters)
        """The update that last changed each as a whole."""
        self._rows_changed_at: dict[int, torch.Tensor] = {}
        """The update that last changed each row: [rows], for parameters with sparse gradients."""
        self._is_copied = [False] * len(self.parameters)
        """Whether the body holds the parameter's current value."""

    def continue_from(self, num_updates: int) -> None:
        """Count on from a snapshot that was loaded."""
        self.num_updates = num_updates

    @torch.no_grad()
    def update(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Have the optimizer take a step with gradients by position; ``None`` skips a parameter."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        with torch.enable_grad():
            self._step()
        self.num_updates += 1
        for position, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                self._copy_shared_state(parameter, parameter.grad)
            parameter.grad = None
            if gradient is not None:
                self._note_change(position, gradient)

    @torch.no_grad()
    def since(self, update: int) -> tuple[TensorBuffer, list[int], list[TensorRows]]:
        """Return what changed after ``update``: a body, the positions in it that did, and rows of other parameters."""
        whole = [position for position, changed_at in enumerate(self._changed_at) if changed_at > update]
        stale = [position for position in whole if not self._is_copied[position]]
        if stale:
            own = [self.parameters[position].detach() for position in stale]
            foreach_copy_([self._body.views[position] for position in stale], own)
            for position in stale:
                self._is_copied[position] = True
        rows: list[TensorRows] = []
        for position, changed_at in self._rows_changed_at.items():
            if self._changed_at[position] > update:
                continue
            indices = (changed_at > update).nonzero()[:, 0]
            if not len(indices):
                continue
            parameter = self.parameters[position].detach()
            values = parameter.index_select(0, indices.to(parameter.device)).cpu().contiguous()
            rows.append(TensorRows(position, indices, values))
        return self._body, whole, rows

    def _copy_shared_state(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Copy optimizer state that shares the gradient's memory: the next gradient overwrites it."""
        state = self.optimizer.state.get(parameter, {})
        memory = gradient.untyped_storage().data_ptr()
        for key, value in state.items():
            is_dense = isinstance(value, torch.Tensor) and not value.is_sparse
            if is_dense and value.untyped_storage().data_ptr() == memory:
                state[key] = value.clone()

    def _note_change(self, position: int, gradient: torch.Tensor) -> None:
        self._is_copied[position] = False
        if not (gradient.is_sparse and self._is_row_local(position)):
            self._changed_at[position] = self.num_updates
            return
        changed_at = self._rows_changed_at.get(position)
        if changed_at is None:
            changed_at = torch.zeros(gradient.shape[0], dtype=torch.int64)
            self._rows_changed_at[position] = changed_at
        changed_at[sparse_indices(gradient)[0].cpu()] = self.num_updates

    def _is_row_local(self, position: int) -> bool:
        options = ROW_LOCAL.get(type(self.optimizer).__name__)
        if options is None or not type(self.optimizer).__module__.startswith("torch.optim"):
            return False
        parameter = self.parameters[position]
        group = next(one for one in self.optimizer.param_groups if any(p is parameter for p in one["params"]))
        return not any(group.get(option) for option in options)


def checked_weights(workers: Sequence[int], reported: Sequence[Sequence[float]]) -> list[float]:
    """Return the number of samples that each worker's gradients are a mean over.

    Args:
        workers: their ranks.
        reported: by worker, the number of each backward since the last step; the gradients are a sum of those means.

    Raises:
        ConfigurationError: the workers' shares differ between backwards, so that one weight does not fit all.
    """
    weights = [one[-1] if one else 0.0 for one in reported]
    total = sum(weights)
    for number in range(max(map(len, reported)) - 1):
        others = [one[number] if number < len(one) else 0.0 for one in reported]
        shares = [(weight * sum(others), other * total) for weight, other in zip(weights, others, strict=True)]
        if not all(math.isclose(share, other, rel_tol=1e-9) for share, other in shares):
            texts = {
                worker: f"backwards that count {' and '.join(f'{weight:g}' for weight in one)}"
                for worker, one in zip(workers, reported, strict=True)
            }
            raise ConfigurationError(
                "Workers called backward() several times per step, with unequal shares of the samples.",
                evidence=fold_values(texts),
                do="add the losses and call backward() once, or run all but the last backward() within `with "
                "rankwise.no_sync(model):`, which computes one mean over all",
            )
    return weights


def are_sums(workers: Sequence[int], reported: Sequence[Sequence[float]], sums: Sequence[Sequence[bool]]) -> bool:
    """Return whether the gradients of workers are sums over samples, given the weight and kind of each backward.

    Raises:
        ConfigurationError: some are, and others are means.
    """
    kinds = {
        worker: {is_sum for weight, is_sum in zip(weights, flags, strict=True) if weight > 0}
        for worker, weights, flags in zip(workers, reported, sums, strict=True)
    }
    found = set[bool]().union(*kinds.values())
    if len(found) > 1:
        of_worker = {
            worker: " and ".join("a sum" if is_sum else "a mean" for is_sum in sorted(one))
            for worker, one in kinds.items()
        }
        raise ConfigurationError(
            "One step has losses that are sums over samples and losses that are means.",
            evidence=fold_values(of_worker),
            do="add the losses in one backward() with reduction='mean', or take a step for each of them",
        )
    return found == {True}


def weighted_mean(parts: Sequence[tuple[float, torch.Tensor | None]], total: float) -> torch.Tensor | None:
    """Return sum_r weight_r g_r / total in the order given, in the memory of the first dense gradient.

    A part of weight zero is left out, even if it is NaN. If all weigh nothing, the mean is zero; if no part has a
    gradient, it is ``None``.
    """
    present = [(weight, gradient) for weight, gradient in parts if gradient is not None]
    found = [(weight / total, gradient) for weight, gradient in present if weight > 0] or [
        (0.0, torch.zeros_like(gradient)) for _, gradient in present
    ]
    if not found:
        return None
    if any(gradient.is_sparse for _, gradient in found):
        dense = [one for one in found if not one[1].is_sparse]
        sparse = [share * gradient for share, gradient in found if gradient.is_sparse]
        added = sum(sparse[1:], start=sparse[0]).coalesce()
        for share, gradient in dense:
            added = share * gradient + added
        return added
    (share, mean), *others = found
    if share != 1.0:
        mean.mul_(share)
    for share, gradient in others:
        mean.add_(gradient, alpha=share)
    return mean
