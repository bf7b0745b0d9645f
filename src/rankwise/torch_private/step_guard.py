# SPDX-License-Identifier: Apache-2.0
"""Notice that an optimizer's update has raised: torch's hooks run only before a step, and after one that succeeds."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CellType

    from torch.optim.optimizer import Optimizer

_UPDATE = "func"
"""What torch's function that runs the hooks calls the method of the class."""


def guard_steps(
    kinds: Sequence[type[Optimizer]], failed: Callable[[Optimizer, BaseException], None]
) -> Callable[[], None]:
    """Call ``failed`` when the update of such an optimizer raises, before the script receives the error.

    Not when a hook raises: hooks see that for themselves.

    Returns:
        A function that ends this.
    """
    ends = [_guard(kind, failed) for kind in kinds]

    def end() -> None:
        for one in ends:
            one()

    return end


def _guard(kind: Any, failed: Callable[[Optimizer, BaseException], None]) -> Callable[[], None]:
    # Schedulers and other libraries keep the method that they found. So the guard is within it, once torch has put its
    # hooks around the class's own, which it does when it makes the first optimizer of the class.
    cell = _update_of(kind.step)
    update: Any = kind.step if cell is None else cell.cell_contents

    @wraps(update)
    def guarded(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return update(optimizer, *args, **kwargs)
        try:
            return update(optimizer, *args, **kwargs)
        except BaseException as error:
            failed(optimizer, error)
            raise

    if cell is None:
        kind.step = guarded
    else:
        cell.cell_contents = guarded

    def end() -> None:
        # Another library's wrap of this one stays, with this one in it.
        if kind.step is guarded:
            kind.step = update
            return
        place = _update_of(kind.step) if cell is None else cell
        if place is not None and place.cell_contents is guarded:
            place.cell_contents = update

    return end


def _update_of(step: Any) -> CellType | None:
    """Return where torch's function that runs the hooks keeps the method of the class, if this is that function."""
    if not getattr(step, "hooked", False):
        return None
    closure = dict(zip(step.__code__.co_freevars, step.__closure__ or (), strict=True))
    return closure.get(_UPDATE)
