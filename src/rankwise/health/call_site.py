# SPDX-License-Identifier: Apache-2.0
"""Where in the user's code a thread is: one line, or the whole stack.

Reads frames and never keeps one: a frame would keep the user's tensors alive.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, FrameType

    CallSite = tuple[CodeType, int]
    """A function in the user's code, and the line in it."""

LONGEST_STACK = 16
"""How many frames of a stack are reported."""
INNERMOST = 3
"""How many innermost frames are reported whatever code they belong to: the user's code waits in them."""
LONGEST_NAMES = 10_000

_LIBRARIES = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(os.__file__).parent}{os.sep}",
    "<frozen ",
    "<__",
    "<eval_with_key>",
)
"""Prefixes of file names that are not the user's: rankwise's, Python's, and code compiled from no file."""
FOR_OTHERS = frozenset((sys.stdlib_module_names - {"__main__"}) | {"numpy"})
"""Modules that open files for others."""
_INSTALLED = ("/site-packages/", "/dist-packages/")
_is_library: dict[str, bool] = {}


def user_call_site(thread_id: int | None = None) -> CallSite | None:
    """Return the innermost line of the user's code that led to this call, or that a thread is in, if there is one.

    Takes about a microsecond: it is called for every collective.
    """
    # The only ways to see one's callers without a traceback, and to see another thread.
    frame = sys._getframe(1) if thread_id is None else sys._current_frames().get(thread_id)  # noqa: SLF001
    known = _is_library
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        is_library = known.get(name)
        if is_library is None:
            is_library = in_library(name)
        if not is_library:
            return code, frame.f_lineno
        frame = frame.f_back
    return None


def site_of_thread(thread_id: int) -> str:
    """Return where a thread is, as ``train.py:33 in load``: the innermost line of the user's code."""
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - the only way to see another thread
    if frame is None:
        return "nothing any more"
    return words(user_call_site(thread_id) or (frame.f_code, frame.f_lineno))


def stack_of_thread(thread_id: int) -> list[str]:
    """Return the frames of a thread, innermost last: the user's, and the last few whatever code they belong to."""
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - the only way to see another thread
    found: list[str] = []
    depth = 0
    while frame is not None and len(found) < LONGEST_STACK:
        name = frame.f_code.co_filename
        if depth < INNERMOST or not in_library(name):
            found.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_qualname}")
        depth += 1
        frame = frame.f_back
    return found[::-1]


def innermost_of_user(stack: Sequence[str]) -> str:
    """Return the innermost frame of the user's code in a stack of :func:`stack_of_thread`; else its innermost frame."""
    return next((frame for frame in reversed(stack) if not in_library(frame.partition(":")[0])), stack[-1])


def responsible_module(means: tuple[str, ...], for_others: frozenset[str] = FOR_OTHERS) -> str:
    """Return the name of the nearest module on the stack that acts for itself; empty if there is none.

    Args:
        means: beginnings of the names of modules that are passed over.
        for_others: packages that are passed over, since they open files or start programs for their callers.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way to see one's callers without a traceback
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if not name.startswith(means) and name.partition(".")[0] not in for_others:
            return name
        frame = frame.f_back
    return ""


def words(site: CallSite | None) -> str:
    """Return a call site as ``train.py:33 in load``."""
    if site is None:
        return "?"
    code, line = site
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}"


def in_library(name: str) -> bool:
    """Return whether a file is not the user's: one of rankwise, of Python, or installed."""
    found = _is_library.get(name)
    if found is None:
        if len(_is_library) > LONGEST_NAMES:  # code generated at run time, each piece with its own name
            _is_library.clear()
        found = name.startswith(_LIBRARIES) or any(folder in name for folder in _INSTALLED)
        _is_library[name] = found
    return found
