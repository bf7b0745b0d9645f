# SPDX-License-Identifier: Apache-2.0
"""A traceback without the frames of torch and rankwise: the user's lines, and how many frames are hidden between them.

Text in, text out. Imported by ``failure``, in the rank's process.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path

from rankwise.health.call_site import in_library

_RANKWISE = f"{Path(__file__).parents[2]}{os.sep}"
_FRAME = re.compile(r'  File "(?P<file>[^"\n]+)", line \d+, in .*\n(?:    .*\n)*(?:  \[Previous line .*\n)?')
_STACK = re.compile(rf"(?:{_FRAME.pattern.replace('?P<file>', '')})+")
_HINT = "; RANKWISE_TRACEBACK=full shows them"


def folded(text: str) -> str:
    """Return a traceback in which runs of frames of torch and rankwise are one line each.

    A stack without any frame of the user's remains as it is.
    """
    short = _STACK.sub(lambda match: _folded_stack(match[0]), text)
    # Only the last line says how to see the frames.
    before, hidden, after = short.rpartition(" hidden]\n")
    return f"{before} hidden{_HINT}]\n{after}" if hidden else short


def _folded_stack(stack: str) -> str:
    frames = [(owner_of(match["file"]), match[0]) for match in _FRAME.finditer(stack)]
    if all(owner for owner, _ in frames):
        return stack
    pieces: list[str] = []
    hidden: list[str] = []
    for owner, frame in [*frames, ("", "")]:
        if owner:
            hidden.append(owner)
            continue
        if hidden:
            frames_of = f"{len(hidden)} frame{'s' * (len(hidden) > 1)} of {' and '.join(sorted(set(hidden))[::-1])}"
            pieces.append(f"  [{frames_of} hidden]\n")
            hidden = []
        pieces.append(frame)
    return "".join(pieces)


def owner_of(file: str) -> str:
    """Return ``"torch"`` or ``"rankwise"`` for a file of theirs, else an empty text."""
    if file.startswith(_RANKWISE):
        return "rankwise"
    torch = sys.modules.get("torch")
    return "torch" if torch is not None and file.startswith(tuple(f"{path}{os.sep}" for path in torch.__path__)) else ""


def line_of(error: BaseException) -> tuple[str, str]:
    """Return the innermost line of the user's own files that raised, and its function; empty texts without one."""
    frames = traceback.extract_tb(error.__traceback__)
    # A script may itself be installed.
    installed = [one for one in frames if "-packages" in one.filename and not owner_of(one.filename)]
    own = [frame for frame in frames if not in_library(frame.filename)] or installed or frames[-1:]
    return (f"{Path(own[-1].filename).name}:{own[-1].lineno}", own[-1].name) if own else ("", "")
