# SPDX-License-Identifier: Apache-2.0
"""Receivers of the launcher's reports: a terminal, a caller of ``launch()``, another machine's launcher."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.launch.report.failure import FailedAttempt, Failure


class Reporter(Protocol):
    """Called from the launcher's one thread."""

    def show(self, text: str) -> None:
        """Show complete lines."""
        ...

    def report(self, failed: FailedAttempt, text: str) -> None:
        """Show how an attempt failed; ``text`` is the report in complete lines."""
        ...

    def end(self, failures: Mapping[int, Failure]) -> None:
        """Receive how ranks of this machine failed in the last attempt; others may have continued without them."""
        ...


class TerminalReporter:
    """Shows everything on stderr."""

    def show(self, text: str) -> None:
        """Show complete lines; a full disk behind stderr is ignored."""
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def report(self, failed: FailedAttempt, text: str) -> None:  # noqa: ARG002 - the text is complete
        """Show how an attempt failed."""
        self.show(text)

    def end(self, failures: Mapping[int, Failure]) -> None:
        """Show nothing: everything has been shown."""
