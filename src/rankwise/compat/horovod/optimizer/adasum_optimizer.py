# SPDX-License-Identifier: Apache-2.0
"""``DistributedOptimizer(op=Adasum)``: every rank steps by itself, and the steps are combined.

Source: Maleki et al. (arXiv:2006.02924), for an optimizer of any kind: what is combined is how far each parameter
moved.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rankwise.compat.horovod.operations.api import synchronize
from rankwise.compat.horovod.operations.reducing import allreduce_async_
from rankwise.compat.horovod.optimizer.wrapped_optimizer import GradientOrderError, PassCounter, WrappedOptimizer
from rankwise.compat.horovod.reduce_ops import Adasum

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


class AdasumOptimizer(WrappedOptimizer):
    """Steps, then combines how far the ranks went."""

    _compression: Any

    def begin(self, compression: Any) -> None:  # noqa: ANN401 - a user's own class too
        """Count backward passes from now on."""
        self._compression = compression
        self._passes = PassCounter(self.backward_passes_per_step, lambda _: None)
        for group in self.param_groups:
            self._follow(group["params"])

    def synchronize(self) -> None:
        """Do nothing: gradients stay this rank's own."""

    @contextmanager
    def skip_synchronize(self) -> Generator[None]:
        """Raise: steps that are not combined would leave the ranks with different parameters.

        Raises:
            GradientOrderError: always; it is an ``AssertionError``.
        """
        raise GradientOrderError(
            "op=Adasum combines the optimizer steps, so synchronization cannot be skipped.", do="call step()"
        )
        yield  # what makes this a context manager

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step, and replace how far this rank went by the Adasum of how far all did.

        Called by: every rank.

        Args:
            closure: computes gradients, and the loss that is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_unfrozen()
        moved = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        for parameter in moved:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        starts = [parameter.detach().clone() for parameter in moved]
        super().step()
        under_way: list[tuple[Any, Any]] = []
        for parameter, start in zip(moved, starts, strict=True):
            compressed, context = self._compression.compress(parameter.detach() - start)
            under_way.append((allreduce_async_(compressed, name=self._parameter_names[parameter], op=Adasum), context))
        for parameter, start, (handle, context) in zip(moved, starts, under_way, strict=True):
            parameter.copy_(start + self._compression.decompress(synchronize(handle), context))
        if self._passes is not None:
            self._passes.start_over()
        return loss
