# SPDX-License-Identifier: Apache-2.0
"""Trims the launcher's frames off a rank's traceback: the user's come first. Imported by code that runs in a rank."""

from __future__ import annotations

from pathlib import Path

_LAUNCH = Path(__file__).parents[1]
_OWN_FRAMES = (
    str(_LAUNCH),
    str(_LAUNCH.parent / "compat" / "horovod" / "__main__.py"),
    "<frozen importlib",
)


def trim(error: BaseException) -> None:
    """Cut the launcher's frames off the start of ``error``'s traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN_FRAMES):
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace
