# SPDX-License-Identifier: Apache-2.0
"""Counts the steps of any optimizer that holds a model's parameters. Knows no other rank."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankwise.torch_private.compiler import uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, MutableMapping

    import torch
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle


class StepListener(Protocol):
    """An object that is called around steps."""

    def before_step(self) -> None:
        """Prepare for a step of any optimizer of the model."""
        ...

    def before_update(self, optimizer: Optimizer) -> None:
        """Prepare the gradients for the step. Called again each time a closure computes them."""
        ...

    def after_update(self, optimizer: Optimizer) -> None:
        """Note that the gradients were used."""
        ...

    def after_step(self) -> None:
        """Count a step of the optimizer that counts."""
        ...


def follow_steps(listener: StepListener, parameters: Iterable[torch.Tensor], *, patience: int) -> Callable[[], object]:
    """Call ``listener``, while it exists, around steps of optimizers that hold any of ``parameters``.

    If several optimizers hold some, only the steps of the first that steps count; another counts instead once it has
    taken more than ``patience`` steps and the first none.

    Returns:
        A function that ends this.
    """
    while _collected:
        _collected.pop().remove()
    following = _StepHooks(listener, parameters, patience)
    handles = [
        register_optimizer_step_pre_hook(following.before),
        register_optimizer_step_post_hook(following.after),
    ]

    # Not removed there: a collection may run while torch is in its loop over the hooks, which then breaks.
    at_collection = weakref.finalize(listener, _collected.extend, handles)

    def end() -> None:
        at_collection.detach()
        for handle in handles:
            handle.remove()

    return end


_collected: list[RemovableHandle] = []
"""Hooks whose listeners have been collected: they do nothing."""


class _StepHooks:
    """What torch calls before and after each step of any optimizer."""

    def __init__(self, listener: StepListener, parameters: Iterable[torch.Tensor], patience: int) -> None:
        self._listener = weakref.ref(listener)
        # Ids stay those of the parameters: the follower keeps them.
        self._ids = {id(parameter) for parameter in parameters}
        self._patience = patience
        self._counting: weakref.ref[Optimizer] | None = None
        self._uncounted: MutableMapping[Optimizer, int] = weakref.WeakKeyDictionary()
        """Steps of the others since the last one that counted."""

    @uncompiled
    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        one = self._listener_of(optimizer)
        if one is None:
            return None
        one.before_step()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            one.before_update(optimizer)
            return None

        def followed_closure() -> Any:
            loss = closure()
            one.before_update(optimizer)
            return loss

        if len(args) > 1:
            return (optimizer, followed_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": followed_closure}

    @uncompiled
    def after(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        one = self._listener_of(optimizer)
        if one is None:
            return
        one.after_update(optimizer)
        if self._counts(optimizer):
            one.after_step()

    def _listener_of(self, optimizer: Optimizer) -> StepListener | None:
        """Return the listener, if ``optimizer`` holds a parameter of the model."""
        listener = self._listener()
        is_of_model = any(not self._ids.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups)
        return listener if is_of_model else None

    def _counts(self, optimizer: Optimizer) -> bool:
        counting = None if self._counting is None else self._counting()
        if counting is not None and counting is not optimizer:
            self._uncounted[optimizer] = missed = self._uncounted.get(optimizer, 0) + 1
            if missed <= self._patience:
                return False
        self._counting = weakref.ref(optimizer)
        self._uncounted.clear()
        return True
