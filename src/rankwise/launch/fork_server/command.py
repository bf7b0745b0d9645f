# SPDX-License-Identifier: Apache-2.0
"""A command that is not a Python script, or has options for Python itself: it replaces a rank's process.

Imported by the command line, and by the module that runs Horovod's commands.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores, but that should end other commands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """An executable and its arguments."""

    executable: str
    words: tuple[str, ...]

    def replace_this_process(self, python_path: Sequence[str] = ()) -> NoReturn:
        """Run it in place of this process: its exit code and the signals it receives are the rank's.

        Args:
            python_path: further folders that its Python programs import from, after those of ``PYTHONPATH``.

        Raises:
            ConfigurationError: the system cannot run it.

        Source: execve(2).
        """
        variables = {**os.environ, "PYTHONPATH": _joined(os.environ.get("PYTHONPATH", ""), python_path)}
        for number in IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            os.execve(self.executable, self.words, variables)  # noqa: S606 - running the user's command is the purpose
        except OSError as error:
            raise ConfigurationError(
                f"The command {self.words[0]!r} cannot be run: {error.strerror}.",
                evidence=f"executable: {self.executable}",
                do="pass a program, or a script that starts with #! and is executable (chmod +x)",
            ) from error


def is_python(word: str) -> bool:
    """Return whether the first word of a command is Python."""
    return re.fullmatch(r"python[0-9.]*", Path(word).name) is not None


def find_command(name: str, arguments: Sequence[str]) -> Command:
    """Find the executable for a command's first word; Python is the one that runs this process.

    Raises:
        ConfigurationError: there is no such program.
    """
    if is_python(name):
        # By its path: Python locates its packages by the name it was called with.
        return Command(executable=sys.executable, words=(sys.executable, *arguments))
    found = shutil.which(name)
    if found is None:
        raise ConfigurationError(
            f"Command {name!r} was not found.",
            evidence=f"searched {os.environ.get('PATH', '')}",
            do="for a script in this folder write ./ before its name; it must be executable (chmod +x)",
        )
    return Command(executable=found, words=(name, *arguments))


def _joined(present: str, more: Sequence[str]) -> str:
    entries = present.split(os.pathsep) if present else []
    return os.pathsep.join([*entries, *(path for path in more if path not in entries)])
