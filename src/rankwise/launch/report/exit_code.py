# SPDX-License-Identifier: Apache-2.0
"""An exit code as text, as a shell reports it, and what killed a process.

Values and text only. Imported by everything that reports how a process exited.
"""

from __future__ import annotations

import signal

OUT_OF_MEMORY = "by the kernel: the machine was out of memory, or a memory limit was reached"
KILLED = "by a user, a program or a scheduler, not by the kernel's out-of-memory killer"


def shell_code(exit_code: int) -> int:
    """Return an exit code as a shell reports it: 128 plus the signal's number for a signal."""
    return 128 - exit_code if exit_code < 0 else exit_code


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def in_words(exit_code: int) -> str:
    """Return how a process exited; ``wait`` reports a signal as a negative exit code."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    hint = ""
    if -exit_code == signal.SIGKILL:
        hint = "; if no one killed it, the machine was out of memory (see `dmesg`)"
    return f"killed by {signal_name(-exit_code)}, exit code {shell_code(exit_code)}{hint}"


def killed_in_words(exit_code: int, *, out_of_memory: bool | None) -> str:
    """Return what killed a process; empty if it was not killed, or if ``out_of_memory`` is unknown."""
    if exit_code != -signal.SIGKILL or out_of_memory is None:
        return ""
    by = OUT_OF_MEMORY if out_of_memory else KILLED
    return f"killed by SIGKILL, exit code {shell_code(exit_code)}; {by}"
