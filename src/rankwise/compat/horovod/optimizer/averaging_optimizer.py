# SPDX-License-Identifier: Apache-2.0
"""``DistributedOptimizer`` with every op but Adasum: gradients are combined, then every rank takes the same step."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rankwise.compat.horovod.optimizer.gradients import GradientReduction, Gradients
from rankwise.compat.horovod.optimizer.wrapped_optimizer import WrappedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rankwise.compat.horovod.process_sets import ProcessSet


class AveragingOptimizer(WrappedOptimizer):
    """Combines gradients, then steps."""

    process_set: ProcessSet
    _gradients: Gradients | None

    def begin(self, reduction: GradientReduction) -> None:
        """Combine gradients from now on, where there is anybody to combine them with."""
        process_set = self.process_set = reduction.process_set
        self._gradients = None
        if process_set.included() and (process_set.size() or 1) > 1:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            names = [self._parameter_names[parameter] for parameter in trained]
            self._gradients = Gradients(names, trained, reduction, self.backward_passes_per_step)
            self._passes = self._gradients.passes
            self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]

    def synchronize(self) -> None:
        """Combine all gradients over the ranks, for what is to change them before ``step``: clipping them, say.

        Called by: every rank of the process set.
        """
        if self._gradients is not None:
            self._follow_unfrozen()
            self._gradients.reduce()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Generator[None]:
        """Have ``step`` leave the gradients as :meth:`synchronize` has made them."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Combine all gradients over the ranks, and step.

        Called by: every rank of the process set.

        Args:
            closure: computes the loss, and gradients unless they are there; they are combined when it has.
        """
        gradients = self._gradients
        is_late = self._should_synchronize and closure is not None and gradients is not None and not self.is_pending
        if self._should_synchronize and not is_late:
            if self._synchronized:
                # Begins as Horovod's, which people filter on.
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). "
                    "Gradients that were already reduced are reduced again: write `with optimizer.skip_synchronize(): "
                    "optimizer.step()`.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        if closure is None:
            super().step()
            return None
        return super().step(self._combining(closure, is_late=is_late))

    def _combining(self, closure: Callable[[], float], *, is_late: bool) -> Callable[[], float]:
        """Return a closure that combines gradients too.

        Args:
            closure: computes the loss.
            is_late: gradients are to come from it, on some rank if not on this one.
        """

        def combined() -> float:
            loss = closure()
            if self._gradients is not None and (is_late or self.is_pending):
                self._gradients.reduce()
            return loss

        return combined

    def forget_gradients(self) -> None:
        """Forget gradients that were computed and not combined, or are on their way."""
        if self._gradients is not None:
            self._gradients.forget()
