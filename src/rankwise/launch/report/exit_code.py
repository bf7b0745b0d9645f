# SPDX-License-Identifier: Apache-2.0
"""An exit code in words, as a shell tells it, and what a killed process was killed by.

Values and text only. Imported by whatever reports how a process ended.
"""

from __future__ import annotations

import signal

OUT_OF_MEMORY = "by the kernel: the machine, or its memory limit, had no memory left"
KILLED = "by a person, a program or a scheduler, not by the kernel for memory"


def shell_code(exit_code: int) -> int:
    """Return an exit code as a shell tells it: 128 and the signal's number for a signal."""
    return 128 - exit_code if exit_code < 0 else exit_code


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def in_words(exit_code: int) -> str:
    """Return how a process ended.

    Args:
        exit_code: as ``wait`` tells it: negative for a signal.
    """
    if exit_code >= 0:
        return f"exit code {exit_code}"
    hint = ""
    if -exit_code == signal.SIGKILL:
        hint = "; where nobody killed it, the machine was out of memory (see `dmesg`)"
    return f"killed by {signal_name(-exit_code)}, exit code {shell_code(exit_code)}{hint}"


def killed_in_words(exit_code: int, *, out_of_memory: bool | None) -> str:
    """Return who killed a process; empty where it was not killed, or nobody knows.

    Args:
        exit_code: as ``wait`` tells it.
        out_of_memory: whether the kernel has killed for memory meanwhile; ``None`` where that cannot be known.
    """
    if exit_code != -signal.SIGKILL or out_of_memory is None:
        return ""
    by = OUT_OF_MEMORY if out_of_memory else KILLED
    return f"killed by SIGKILL, exit code {shell_code(exit_code)}; {by}"
