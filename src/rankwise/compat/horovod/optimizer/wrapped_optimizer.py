# SPDX-License-Identifier: Apache-2.0
"""The base of ``DistributedOptimizer``s of any class: it counts backward passes and checks the order of calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar, cast

import torch

from rankwise.errors import ConfigurationError
from rankwise.replicate.gradient_buckets import call_when_accumulated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn


W = TypeVar("W", bound="WrappedOptimizer")


class WrappedOptimizer(torch.optim.Optimizer):
    """The first base of a class that is otherwise the wrapped optimizer's own."""

    backward_passes_per_step: int
    _parameter_names: dict[nn.Parameter, str]
    """Named as in Horovod's optimizers, since subclasses and scripts read it."""
    _passes: PassCounter | None = None
    """``None`` if there are no other ranks to combine with."""
    _frozen: list[nn.Parameter]
    _synchronized = False
    _should_synchronize = True

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients that no step has used."""
        return self._passes is not None and self._passes.is_pending

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise: a copy would not correspond to an optimizer on the other ranks."""
        raise ConfigurationError(
            "A DistributedOptimizer cannot be pickled or copied.",
            do="save optimizer.state_dict(), and load it into a newly wrapped optimizer",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and combine their gradients too."""
        super().add_param_group(param_group)
        known = {*map(id, self._parameter_names)}
        index = len(self.param_groups) - 1
        for number, parameter in enumerate(self.param_groups[index]["params"]):
            if id(parameter) not in known:
                self._parameter_names[parameter] = f"allreduce.noname.{index}.{number}"
        self._follow(self.param_groups[index]["params"])

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Expect this number of backward passes before each step, from now on.

        Complete gradients of the current step remain complete, since they may be being sent already: the next backward
        that adds to one before ``step()`` raises a GradientOrderError. The others get ``passes`` more.
        """
        self.backward_passes_per_step = passes
        if self._passes is not None:
            self._passes.expect(passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state; gradients that were not combined yet are discarded."""
        self._synchronized = False
        self._should_synchronize = True
        # A single rank may load: if nothing is being sent, its channels must remain as on the others.
        if self.is_pending:
            self.forget_gradients()
        groups = self.param_groups
        super().load_state_dict(state_dict)
        # Keep the same dicts: a scheduler that was created before the optimizer was wrapped refers to them.
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
        """Clear the gradients.

        Raises:
            GradientOrderError: no step has used them yet. It is an ``AssertionError`` too.
        """
        if self.is_pending:
            raise GradientOrderError(
                "zero_grad() was called after backward() and before step() or synchronize(): gradients that are "
                "already being reduced would be lost.",
                do="call zero_grad() before the first backward() of a step, or after step()",
            )
        super().zero_grad(set_to_none)

    def _follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Count the gradients of parameters; of frozen ones, once they are no longer frozen."""
        if self._passes is not None:
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            self._passes.follow([self._parameter_names[parameter] for parameter in trained], trained)
            self._frozen += [parameter for parameter in parameters if not parameter.requires_grad]

    def _follow_unfrozen(self) -> None:
        if any(parameter.requires_grad for parameter in self._frozen):
            were_frozen, self._frozen = self._frozen, []
            self._follow(were_frozen)

    def forget_gradients(self) -> None:
        """Discard gradients that were computed but not combined."""
        if self._passes is not None:
            self._passes.start_over()


def wrapped(kind: type[W], optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], passes: int) -> W:
    """Return an optimizer with the class and the state of ``optimizer``, which is a ``kind`` too."""
    own = type(optimizer)
    both = type(own.__name__, (kind, own), {"__doc__": own.__doc__, "__module__": own.__module__})
    result = object.__new__(both)
    vars(result).update(vars(optimizer), backward_passes_per_step=passes, _parameter_names=names, _frozen=[])
    # A scheduler may have stored the optimizer's own step here.
    vars(result).pop("step", None)
    return cast("W", result)


class GradientOrderError(ConfigurationError, AssertionError):
    """Backward, ``step`` and ``zero_grad`` were called in an order that would lose gradients."""


class PassCounter:
    """Counts the gradients of some parameters; calls ``complete(number)`` after ``num_passes``, while backward runs."""

    def __init__(self, num_passes: int, complete: Callable[[int], None]) -> None:
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        self._num_passes = num_passes
        self._expected: list[int] = []
        """For each gradient, the number of passes of this step after which it is complete."""
        self._left: list[int] = []
        self._complete = complete
        self.is_pending = False
        """Whether there are gradients that no step has used."""

    def follow(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """Count the gradients of more parameters."""
        for name, parameter in zip(names, parameters, strict=True):
            call_when_accumulated(parameter, self, PassCounter._count, len(self.parameters))
            self.names.append(name)
            self.parameters.append(parameter)
            self._expected.append(self._num_passes)
            self._left.append(self._num_passes)

    def expect(self, num_passes: int) -> None:
        """Expect ``num_passes`` before each step, from now on; complete gradients of this step remain complete."""
        self._num_passes = num_passes
        for number, left in enumerate(self._left):
            if left > 0:
                self._expected[number] += num_passes - left
                self._left[number] = num_passes

    def start_over(self) -> None:
        """Begin a step."""
        self._expected = [self._num_passes] * len(self.parameters)
        self._left = self._expected.copy()
        self.is_pending = False

    def _count(self, number: int) -> None:
        left = self._left[number]
        if left <= 0:
            expected = self._expected[number]
            late = f", complete before set_backward_passes_per_step({self._num_passes})" * (expected < self._num_passes)
            raise GradientOrderError(
                "backward() ran more than backward_passes_per_step times before step().",
                evidence=f"{self.names[number]}: pass {expected + 1} of {expected}{late}",
                do="set backward_passes_per_step to the number of backward passes between two steps, before the first",
            )
        gradient = self.parameters[number].grad
        if gradient is not None and gradient.requires_grad:
            raise GradientOrderError(
                "Gradients that backward(create_graph=True) leaves in parameters of a DistributedOptimizer cannot be "
                "differentiated again.",
                do="take the inner gradient with torch.autograd.grad(..., create_graph=True), then call backward once",
            )
        self.is_pending = True
        self._left[number] = left - 1
        if left == 1:
            self._complete(number)
