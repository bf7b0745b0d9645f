# SPDX-License-Identifier: Apache-2.0
"""``no_sync`` and ``weight``, and the gradients of microsteps, added up on this rank with their weights.

What a script declares around ``backward()`` is the same for every strategy. While an accumulation is open, each
gradient is multiplied by its microstep's share before torch adds it to ``grad``. Gradients of earlier steps are exact
already: they are set aside, so that this step does not reduce them again. Knows no other rank.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import get_gradient_edge

from rankwise.errors import ConfigurationError
from rankwise.replicate.loss.graph import multiplied, one_amount
from rankwise.replicate.strategy_registry import registered_strategy
from rankwise.torch_private.autograd import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from torch import nn
    from torch.autograd.graph import Node

    from rankwise.comm.backends.protocol import Amount


@contextmanager
def no_sync(*models: nn.Module) -> Generator[None]:
    """Add gradients up on this rank only; the first backward outside the block makes them exact.

    Called by: every rank. For accumulation: all microsteps but the last one inside the block, the last one
    outside. The gradients are then the mean over all samples of all microsteps of all ranks, so do not divide
    the loss by the number of microsteps; they may be unequal in size and number. A sharded model keeps whole
    gradients on each rank meanwhile, and clearing gradients does not forget microsteps.

    Args:
        models: replicated or sharded models.

    Raises:
        ConfigurationError: a model is neither.
    """
    found = [registered_strategy(model, "no_sync") for model in models]
    with ExitStack() as undo:
        for one in found:
            undo.callback(one.set_accumulating, one.set_accumulating(True))
        yield


@contextmanager
def weight(model: nn.Module, amount: float | torch.Tensor) -> Generator[None]:
    """Declare what the loss of the backward inside the block is a mean over, on this rank.

    Called by: every rank, each with its own amount, around ``loss.backward()``.

    For a loss that is a mean over tokens: ``with rankwise.weight(model, num_tokens): loss.backward()``. The
    gradients are then means over all tokens of all ranks, however many each rank has.

    Args:
        model: a replicated or sharded model.
        amount: number of tokens or samples on this rank, at least zero.

    Raises:
        ConfigurationError: the model is neither, or the amount is negative or not finite.
    """
    found = registered_strategy(model, "weight")
    before = found.set_given_weight(one_amount(amount, "rankwise.weight() takes", "pass"))
    try:
        yield
    finally:
        found.set_given_weight(before)


# -- microsteps ---------------------------------------------------------------------------------------

Earlier = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, each with the gradient that it had."""


def set_aside(tensors: Iterable[torch.Tensor]) -> Earlier:
    """Clear ``grad`` and return copies of its values."""
    # Its memory may be a channel's, which the next reduction overwrites.
    earlier = [(tensor, tensor.grad.detach().clone()) for tensor in tensors if tensor.grad is not None]
    for tensor, _ in earlier:
        tensor.grad = None
    return earlier


@torch.no_grad()
def add_back(earlier: Earlier) -> None:
    """Add the gradients that were set aside to ``grad``."""
    for tensor, gradient in earlier:
        tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)


def restore(tensors: Iterable[torch.Tensor], earlier: Earlier) -> None:
    """Put back the gradients that were set aside, in place of those that a failed step has left."""
    for tensor in tensors:
        tensor.grad = None
    for tensor, gradient in earlier:
        tensor.grad = gradient


class Microsteps:
    """The microsteps since the last exact gradient."""

    def __init__(self) -> None:
        self.is_open = False
        """Whether gradients of some microsteps wait, on every rank, for those of the last."""
        self.is_continued = False
        """Whether another microstep follows the one under way."""
        self.carried: Amount = 0.0
        """The sum of the weights of the microsteps that have been added up."""
        self.counted_in: str | None = None
        """What their weights count, in words, after the first one that counts anything."""

    def set_continued(self, value: bool) -> bool:  # noqa: FBT001 - the value to set
        """Set whether another microstep follows the one under way; return the value before."""
        before, self.is_continued = self.is_continued, value
        return before

    def count_in(self, unit: str) -> None:
        """Note what the weight of the microstep under way counts, in words.

        Raises:
            ConfigurationError: those of earlier ones count something else, so that they cannot be added up.
        """
        if self.counted_in not in (None, unit):
            raise ConfigurationError(
                "Microsteps of one accumulation weight their losses in different units.",
                evidence=f"the earlier ones count {self.counted_in}; this one counts {unit}",
                do="compute the same loss in every microstep, and use rankwise.weight() for all of them or for none",
            )
        self.counted_in = unit

    def put_earlier_gradients_aside(self) -> None:
        """Keep the current ``grad`` out of the next backward, unless torch does so itself."""

    def give_back_earlier(self) -> None:
        """Add the gradients that were put aside to ``grad``."""


class Accumulation(Microsteps):
    """The microsteps of a model whose gradients torch adds up in ``grad``."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.is_begun = False
        """Whether there is anything for :meth:`close` to forget."""
        self._names = names
        self._parameters = parameters
        self._earlier: Earlier = []
        self._marks: dict[int, tuple[torch.Tensor, int]] = {}
        self._scalers: dict[int, tuple[Node, torch.utils.hooks.RemovableHandle]] = {}
        """By parameter, the node that adds its gradient up, which nothing else keeps, and its hook."""

    def expect(self, numbers: Iterable[int], share: Callable[[], Amount]) -> None:
        """Follow gradients before torch adds them up: the first one may begin the backward.

        Args:
            numbers: of the parameters that get gradients.
            share: returns the factor for the gradients of the backward under way; may begin it.
        """
        self.is_begun = True
        # The kept nodes keep the hook: a hook that held the rest would never release the model's memory.
        followed, share_of_step = weakref.ref(self), weakref.WeakMethod(share)

        def scaled(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
            accumulation, current_share = followed(), share_of_step()
            if accumulation is None or current_share is None:
                return gradients
            factor = current_share()
            if not accumulation.is_open:
                return gradients
            (gradient,) = gradients
            if gradient is None:
                return gradients
            # A microstep without samples contributes nothing, not even a NaN.
            return (multiplied(gradient, factor),)

        for number in numbers:
            parameter = self._parameters[number]
            if number not in self._scalers and parameter.requires_grad:
                # A hook of the parameter itself would also change what torch.autograd.grad returns.
                node = get_gradient_edge(parameter).node
                self._scalers[number] = node, node.register_prehook(scaled)

    def begin(self, numbers: Iterable[int], share: Callable[[], Amount], *, continues: bool) -> None:
        """Prepare for a backward.

        Args:
            numbers: of the parameters that get gradients.
            share: as for :meth:`expect`.
            continues: whether another microstep will follow.

        Raises:
            ConfigurationError: gradients were changed in the middle of an accumulation.
        """
        if self.is_open and self._was_cleared():
            self.close()
        if continues and not self.is_open:
            self.put_earlier_gradients_aside()
            self.is_open = True
            self.expect(numbers, share)

    def add(self, share: Amount) -> None:
        """Note that a microstep has been added up."""
        self.carried += share
        self._marks = {
            number: (parameter.grad, version_of(parameter.grad))
            for number, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        }

    def earlier(self) -> dict[int, torch.Tensor]:
        """Return the gradients that were put aside, by the identity of their parameters."""
        return {id(parameter): gradient for parameter, gradient in self._earlier}

    def give_back_earlier(self) -> None:
        """End the accumulation; gradients from before it, which were exact already, are added."""
        add_back(self._earlier)
        self.close()

    def close_empty(self) -> None:
        """Undo the beginning of an accumulation if nothing was added up: ``torch.autograd.grad`` adds nothing."""
        if not self.is_open or self._marks:
            return
        add_back(self._earlier)
        self._earlier.clear()
        self.is_open = False

    def abandon(self) -> None:
        """Forget a microstep that was interrupted. Earlier ones count unless the gradients have been cleared."""
        if not self._marks:
            self.close()

    def close(self) -> None:
        """Forget everything."""
        for _, handle in self._scalers.values():
            handle.remove()
        self._scalers.clear()
        self._earlier.clear()
        self._marks.clear()
        self.is_open = self.is_begun = False
        self.counted_in = None
        self.carried = 0.0

    def put_earlier_gradients_aside(self) -> None:
        """Keep the current ``grad`` out of the next backward, until :meth:`give_back_earlier`."""
        self.is_begun = True
        self._earlier += set_aside(self._parameters)

    def _was_cleared(self) -> bool:
        """Return whether the user has cleared all gradients since the last microstep."""
        changed: dict[int, bool] = {}
        for number, (gradient, version) in self._marks.items():
            now = self._parameters[number].grad
            if now is None or now is not gradient or version_of(now) != version:
                changed[number] = now is None or not bool(now.any())
        if not changed:
            return False
        if len(changed) == len(self._marks) and all(changed.values()):
            return True
        left = next((number for number in self._marks if not changed.get(number, False)), 0)
        raise ConfigurationError(
            "Gradients were changed in the middle of an accumulation.",
            evidence=f"{self._names[left]} still holds a part of it while others do not, or it was changed in place",
            do="clear the gradients of the whole model (model.zero_grad()), and clip them after the last microstep",
        )
