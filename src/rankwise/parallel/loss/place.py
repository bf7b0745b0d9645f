# SPDX-License-Identifier: Apache-2.0
"""Where in the user's code a backward was called."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_SKIPPED = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))


def place_of_backward() -> str:
    """Return the file and line of the nearest caller that is neither torch nor rankwise."""
    frame = sys._getframe(1)  # noqa: SLF001 - the only way to a caller's line without formatting a stack
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
