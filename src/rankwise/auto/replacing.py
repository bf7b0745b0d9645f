# SPDX-License-Identifier: Apache-2.0
"""Functions of modules and classes replaced in a rank: from now on, or while a script runs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    Replaced = list[tuple[object, str, Any]]
    """Objects, names of their attributes, and the values before."""


def replace_attributes(owner: object, names: Sequence[str], make: Callable[[Any], Any]) -> Replaced:
    """Replace attributes, and return what they were.

    Args:
        owner: a module or a class.
        names: of its attributes. Those that it does not have are left out.
        make: returns the new value for the old one.
    """
    before: Replaced = [(owner, name, getattr(owner, name)) for name in names if hasattr(owner, name)]
    for _, name, value in before:
        setattr(owner, name, make(value))
    return before


@contextmanager
def replaced(*changes: tuple[object, Sequence[str], Callable[[Any], Any]]) -> Generator[None]:
    """Replace attributes inside the block; ``changes`` are the arguments of :func:`replace_attributes`."""
    before: Replaced = []
    try:
        for change in changes:
            before += replace_attributes(*change)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
