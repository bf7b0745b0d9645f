# SPDX-License-Identifier: Apache-2.0
"""Functions of a module replaced inside a block, for the thread that entered it.

Used by numpy_draws and python_draws.
"""

from __future__ import annotations

from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from types import ModuleType

    Draw = Callable[..., Any]


@contextmanager
def replacing(module: ModuleType, names: Iterable[str], replace: Callable[[str, Draw], Draw]) -> Generator[None]:
    """Replace functions of a module inside the block; other threads, as one that reads ahead, call those from before.

    Args:
        module: whose functions are public scripts' way to draw.
        names: of the functions.
        replace: returns what to call in the place of a function, by its name and itself.
    """
    before = {name: getattr(module, name) for name in names}
    for name, draw in before.items():
        setattr(module, name, _in_this_thread(draw, replace(name, draw)))
    try:
        yield
    finally:
        for name, draw in before.items():
            setattr(module, name, draw)


def _in_this_thread(draw: Draw, replaced: Draw) -> Draw:
    thread = get_ident()

    # Without functools.wraps, which takes longer than the rest.
    def dispatch(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever it draws
        return (replaced if get_ident() == thread else draw)(*args, **kwargs)

    return dispatch
