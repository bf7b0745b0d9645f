# SPDX-License-Identifier: Apache-2.0
"""Functions of modules and classes replaced while a script runs; what it registers for its end called at its end."""

from __future__ import annotations

import atexit
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rankwise.health.call_site import responsible_module

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence


@contextmanager
def replaced(*changes: tuple[object, Sequence[str], Callable[[Any], Any]]) -> Generator[None]:
    """Replace attributes inside the block.

    Args:
        changes: an object, names of its attributes, and what makes the new value of the old one. Names that the object
            does not have are left out.
    """
    before: list[tuple[object, str, Any]] = []
    try:
        for owner, names, make in changes:
            for name in names:
                if hasattr(owner, name):
                    before.append((owner, name, getattr(owner, name)))
                    setattr(owner, name, make(getattr(owner, name)))
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


@contextmanager
def exit_functions_called() -> Generator[None]:
    """Call what the script passes to ``atexit.register`` when the block ends, not when the process does."""

    def registering(register: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as Python's own
            if responsible_module() != "__main__":
                return register(function, *args, **kwargs)
            at_end.callback(function, *args, **kwargs)
            return function

        return call

    with ExitStack() as at_end, replaced((atexit, ["register"], registering)):
        yield
