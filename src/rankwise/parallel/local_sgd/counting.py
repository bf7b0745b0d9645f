# SPDX-License-Identifier: Apache-2.0
"""Steps of whichever optimizer holds a model's parameters, built before or after. Knows no other rank."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankwise.parallel.uncompiled import uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch.optim import Optimizer


class Follower(Protocol):
    """What is told of steps."""

    def before_step(self) -> None:
        """Prepare for a step of any optimizer of the model."""
        ...

    def after_step(self) -> None:
        """Count a step of the optimizer that counts."""
        ...


def follow_steps(follower: Follower, parameters: Iterable[torch.Tensor]) -> Callable[[], object]:
    """Tell ``follower``, for as long as it lives, of steps of optimizers that hold any of ``parameters``.

    Where several hold some, only the first that steps counts, as long as it is there.

    Returns:
        What ends it.
    """
    # Ids stay those of the parameters: the follower keeps them.
    ids = {id(parameter) for parameter in parameters}
    followed = weakref.ref(follower)
    counting: list[weakref.ref[Optimizer]] = []

    def is_of_model(optimizer: Optimizer) -> bool:
        return any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])

    @uncompiled
    def before(optimizer: Optimizer, _: Any, __: Any) -> None:  # noqa: ANN401 - as torch calls it
        one = followed()
        if one is not None and is_of_model(optimizer):
            one.before_step()

    @uncompiled
    def after(optimizer: Optimizer, _: Any, __: Any) -> None:  # noqa: ANN401 - as torch calls it
        one = followed()
        if one is None or not is_of_model(optimizer):
            return
        if not counting or counting[0]() is None:
            counting[:] = [weakref.ref(optimizer)]
        if counting[0]() is optimizer:
            one.after_step()

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return weakref.finalize(follower, end)
