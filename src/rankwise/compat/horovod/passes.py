# SPDX-License-Identifier: Apache-2.0
"""How many backward passes each parameter has had since the last step. Used by gradients and adasum_optimizer."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn


class GradientOrderError(ConfigurationError, AssertionError):
    """Backward, ``step`` and ``zero_grad`` were called in an order that would lose gradients."""


class Passes:
    """Counts the gradients of some parameters, and says when one is complete."""

    def __init__(self, num_passes: int, complete: Callable[[int], None]) -> None:
        """Count for nobody yet.

        Args:
            num_passes: after how many a gradient is complete.
            complete: is then called with the parameter's number, while backward runs.
        """
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        self._num_passes = num_passes
        self._left: list[int] = []
        self._complete = complete
        self._touched = False

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients that no step has used."""
        return self._touched

    def follow(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """Count the gradients of more parameters."""
        for name, parameter in zip(names, parameters, strict=True):
            parameter.register_post_accumulate_grad_hook(self._hook(len(self.parameters)))
            self.names.append(name)
            self.parameters.append(parameter)
            self._left.append(self._num_passes)

    def expect(self, num_passes: int) -> None:
        """Expect ``num_passes`` before each step, from now on."""
        self._num_passes = num_passes
        self._left = [num_passes] * len(self.parameters)

    def start_over(self) -> None:
        """Begin a step."""
        self._left = [self._num_passes] * len(self.parameters)
        self._touched = False

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        # The parameter holds the hook: a hook that held the optimizer would keep its state for ever.
        followed = weakref.ref(self)

        def arrived(_: torch.Tensor) -> None:
            passes = followed()
            if passes is not None:
                passes._count(number)  # noqa: SLF001 - its own

        return arrived

    def _count(self, number: int) -> None:
        left = self._left[number]
        if left <= 0:
            raise GradientOrderError(
                "Gradients were computed more often than backward_passes_per_step before step().",
                evidence=f"{self.names[number]}: pass {self._num_passes + 1} of {self._num_passes}",
                do="pass the number of backward passes between two steps as backward_passes_per_step",
            )
        gradient = self.parameters[number].grad
        if gradient is not None and gradient.requires_grad:
            raise GradientOrderError(
                "What backward(create_graph=True) leaves in the parameters of a DistributedOptimizer cannot be "
                "differentiated again.",
                do="take the inner gradient with torch.autograd.grad(..., create_graph=True), then call backward once",
            )
        self._touched = True
        self._left[number] = left - 1
        if left == 1:
            self._complete(number)
