# SPDX-License-Identifier: Apache-2.0
"""What ranks say, against what they are expected to say."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence


def check_said(said: Sequence[str], expected: Sequence[str]) -> None:
    """Check that each text holds the part that is expected in its place, and that there are no others."""
    assert len(said) == len(expected), said
    for text, part in zip(said, expected, strict=True):
        assert part in text, f"{part!r} is not in {text!r}"


@contextmanager
def listening() -> Generator[list[str]]:
    """Yield a list that holds what this rank logs inside the block."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rankwise")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
