# SPDX-License-Identifier: Apache-2.0
"""Functions of modules and classes replaced while a script runs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
