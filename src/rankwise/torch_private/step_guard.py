# SPDX-License-Identifier: Apache-2.0
"""Notice that an optimizer's step has raised: torch's hooks run only before a step, and after one that succeeds."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def guard_steps(
    kinds: Sequence[type[Optimizer]], failed: Callable[[Optimizer, BaseException], None]
) -> Callable[[], None]:
    """Call ``failed`` when a step of such an optimizer raises, before the script receives the error.

    Returns:
        A function that ends this.
    """
    ends = [_guard(kind, failed) for kind in kinds]

    def end() -> None:
        for one in ends:
            one()

    return end


def _guard(kind: Any, failed: Callable[[Optimizer, BaseException], None]) -> Callable[[], None]:
    step: Any = kind.step
    if not getattr(step, "hooked", False):
        # torch does this when it makes the first optimizer of a kind; later it would be around the guard.
        step = Optimizer.profile_hook_step(step)
        step.hooked = True

    @wraps(step)
    def guarded(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return step(optimizer, *args, **kwargs)
        try:
            return step(optimizer, *args, **kwargs)
        except BaseException as error:
            failed(optimizer, error)
            raise

    kind.step = guarded

    def end() -> None:
        # Another library's wrap of this one stays, with this one in it.
        if kind.step is guarded:
            kind.step = step

    return end
