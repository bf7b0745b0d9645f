# SPDX-License-Identifier: Apache-2.0
"""What a folder holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def names(path: Path) -> list[str]:
    """Return the names, without that of the lock that this process holds on a folder of checkpoints."""
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(".rankwise-lock-"))
