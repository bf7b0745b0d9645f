# SPDX-License-Identifier: Apache-2.0
"""A traceback without the frames of torch and rankwise: the user's lines, and how many frames are hidden between them.

The one place that formats an exception for people: for a rank's own terminal, for the launcher's report and for the
errors of other ranks. ``RANKWISE_TRACEBACK=full`` keeps every frame.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from rankwise.health.call_site import in_library
from rankwise.world.environments.process import shows_all_frames

_RANKWISE = f"{Path(__file__).parents[1]}{os.sep}"
_PYTHON = (f"{Path(os.__file__).parent}{os.sep}", "<frozen ")
_FRAME = re.compile(
    r'^(?P<lines>  File "(?P<file>[^"\n]+)", line \d+, in .*\n(?:    .*\n)*)'
    r"(?:  \[Previous line repeated (?P<times>\d+) more times?\]\n)?",
    re.MULTILINE,
)
_STACK = re.compile(rf"(?:{re.sub(r'[?]P<[a-z]+>', '?:', _FRAME.pattern)})+", re.MULTILINE)
_BETWEEN = re.compile(
    r"(?<=\n)(\n(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):\n\n)"
)
SHORTEST_TEXT = 8
_TITLE = "Traceback (most recent call last):\n"
_HINT = "; RANKWISE_TRACEBACK=full shows them"
_OWNERS = ("torch", "rankwise", "Python", "the same lines")
"""Whose frames are hidden: Python's own only below those of the first two, the same lines in a recursion."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One exception of a chain, as text."""

    before: str
    """The line between it and the one before."""
    stack: str
    message: str

    def is_repeated_by(self, error: _Part) -> bool:
        """Return whether rankwise has caught this exception, and raised ``error`` with its message."""
        frame = _FRAME.match(self.stack)
        kind, _, message = self.message.strip().partition(": ")
        is_caught = frame is None or owner_of(frame["file"]) == "rankwise"
        # The text of KeyError: 0 is in almost any message.
        is_told = len(message) >= SHORTEST_TEXT or kind.rpartition(".")[2] in error.message
        return is_caught and is_told and (message or kind) in error.message


def formatted(error: BaseException) -> str:
    """Return the traceback of an exception and of its causes: folded, unless the user asks for all frames."""
    text = "".join(traceback.format_exception(error))
    return text if shows_all_frames() else folded(text)


def folded(text: str) -> str:
    """Return a traceback in which runs of frames of torch and rankwise are one line each.

    An exception that rankwise caught to raise a better one is one traceback with it, if that has the same message. Text
    without any frame of the user's remains as it is.
    """
    if all(owner_of(frame["file"]) or _is_python(frame["file"]) for frame in _FRAME.finditer(text)):
        return text
    parts: list[_Part] = []
    before = ""
    for number, piece in enumerate(_BETWEEN.split(text)):
        if number % 2:
            before = piece
            continue
        found = _STACK.match(piece, len(_TITLE)) if piece.startswith(_TITLE) else None
        stack = found[0] if found else ""
        part = _Part(before, stack, piece[len(_TITLE) + len(stack) :] if found else piece)
        while parts and parts[-1].is_repeated_by(part):
            cause = parts.pop()
            part = _Part(cause.before, part.stack + cause.stack, part.message)
        parts.append(part)
    short = "".join(
        part.before
        + (_TITLE + _folded_stack(part.stack) if part.stack else "")
        + _STACK.sub(lambda match: _folded_stack(match[0]), part.message)
        for part in parts
    )
    # Only the last line says how to see the frames.
    start, hidden, end = short.rpartition(" hidden]\n")
    return f"{start} hidden{_HINT}]\n{end}" if hidden else short


def _folded_stack(stack: str) -> str:
    pieces: list[str] = []
    hidden: list[str] = []
    owner = ""
    for frame in _FRAME.finditer(stack):
        owner = owner_of(frame["file"]) or ("Python" if owner and _is_python(frame["file"]) else "")
        again = frame["lines"] in pieces
        if owner or again:
            hidden.append(owner or "the same lines")
        else:
            pieces += [*_count_of(hidden), frame["lines"]]
            hidden = []
        hidden += ["the same lines"] * int(frame["times"] or 0)
    return "".join([*pieces, *_count_of(hidden)])


def _count_of(hidden: list[str]) -> list[str]:
    if not hidden:
        return []
    owners = " and ".join(owner for owner in _OWNERS if owner in hidden)
    return [f"  [{len(hidden)} frame{'s' * (len(hidden) > 1)} of {owners} hidden]\n"]


def _is_python(file: str) -> bool:
    return file.startswith(_PYTHON) and "-packages" not in file


def owner_of(file: str) -> str:
    """Return ``"torch"`` or ``"rankwise"`` for a file of theirs, else an empty text."""
    if file.startswith(_RANKWISE):
        return "rankwise"
    torch = sys.modules.get("torch")
    return "torch" if torch is not None and file.startswith(tuple(f"{path}{os.sep}" for path in torch.__path__)) else ""


def line_of(error: BaseException) -> tuple[str, str]:
    """Return the innermost line of the user's own files that raised, and its function; empty texts without one."""
    return (lines_of(error) or [("", "")])[-1]


def lines_of(error: BaseException) -> list[tuple[str, str]]:
    """Return the lines of the user's own files that led to an error, innermost last, each with its function."""
    frames = traceback.extract_tb(error.__traceback__)
    # A script may itself be installed.
    installed = [one for one in frames if "-packages" in one.filename and not owner_of(one.filename)]
    own = [frame for frame in frames if not in_library(frame.filename)] or installed or frames[-1:]
    return [(f"{Path(frame.filename).name}:{frame.lineno}", frame.name) for frame in own]
