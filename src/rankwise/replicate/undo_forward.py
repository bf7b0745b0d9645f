# SPDX-License-Identifier: Apache-2.0
"""Undoing what a forward pass did to the attributes of modules and to Python's random numbers.

Values of tensors are not restored. Used by what runs a model only to look at it: pipeline, tensor_parallel.
"""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn


@contextmanager
def left_as_it_was(model: nn.Module) -> Generator[None]:
    """Restore, after the block, the attributes of all modules, and the contents of their lists, dicts and sets.

    A cache that forward builds when it first runs would otherwise hold tensors without data, or be on one rank only.
    """
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    inside: list[tuple[Any, Any]] = [
        (value, value.copy())
        for _, attributes in before
        for value in attributes.values()
        if type(value) in (dict, list, set)
    ]
    try:
        yield
    finally:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for value, content in inside:
            value.clear()
            if isinstance(value, list):
                value.extend(content)
            else:
                value.update(content)


class PythonRandomness:
    """The state of Python's and NumPy's random numbers: a program contains the numbers drawn while it was traced."""

    def __init__(self) -> None:
        self._state = _state()

    def has_moved(self) -> bool:
        """Return whether numbers have been drawn since, or since :meth:`put_back`."""
        return _state() != self._state

    def put_back(self) -> None:
        """Have the same numbers drawn again."""
        of_python, of_numpy = self._state
        random.setstate(of_python)
        if of_numpy is not None:
            sys.modules["numpy.random"].set_state(of_numpy)


def _state() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return random.getstate(), None
    kind, keys, *rest = numpy.get_state()
    return random.getstate(), (kind, keys.tolist(), *rest)
