# SPDX-License-Identifier: Apache-2.0
"""Writes the file that the user has named for a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


def write_page(path: Path, text: str) -> None:
    """Write a page; raise ConfigurationError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}.", do="choose another file") from error
