# SPDX-License-Identifier: Apache-2.0
"""What ranks say, against what they are expected to say."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_said(said: Sequence[str], expected: Sequence[str]) -> None:
    """Check that each text holds the part that is expected in its place, and that there are no others."""
    assert len(said) == len(expected), said
    for text, part in zip(said, expected, strict=True):
        assert part in text, f"{part!r} is not in {text!r}"
