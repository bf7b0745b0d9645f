# SPDX-License-Identifier: Apache-2.0
"""A model as it was before it ran: what forward wrote to its modules is taken back, and Python's random numbers too.

Values of tensors stay as forward has left them. Used by traced and cost.
"""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn


@contextmanager
def left_as_it_was(model: nn.Module) -> Generator[None]:
    """Take back, after the block, what its modules have as attributes, and what is in their lists and dicts.

    A cache that forward makes when it first runs would otherwise hold tensors without data, or be on one rank only.
    """
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    inside = [
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
            _refill(value, content)


def _refill(value: Any, content: Any) -> None:  # noqa: ANN401 - a dict, list or set, and a copy of it
    if isinstance(value, list):
        cast("list[Any]", value)[:] = content
    else:
        value.clear()
        value.update(content)


class PythonRandomness:
    """Where Python's and NumPy's random numbers stand: a program knows those drawn while it was made only."""

    def __init__(self) -> None:
        self._state = _state()

    def has_moved(self) -> bool:
        """Return whether numbers have been drawn since, or since :meth:`put_back`."""
        return _state() != self._state

    def put_back(self) -> None:
        """Have the same numbers drawn again."""
        state = self._state
        random.setstate(state[0])
        numpy = sys.modules.get("numpy.random")
        if numpy is not None and state[1] is not None:
            kind, keys, *rest = state[1]
            numpy.set_state((kind, list(keys), *rest))


def _state() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return random.getstate(), None
    kind, keys, *rest = numpy.get_state()
    return random.getstate(), (kind, tuple(keys.tolist()), *rest)
