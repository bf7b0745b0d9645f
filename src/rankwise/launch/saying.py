# SPDX-License-Identifier: Apache-2.0
"""Who hears what the launcher has to say: a terminal, a caller of ``launch()``, another machine's launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.launch.failure import FailedAttempt, Failure


class Saying(Protocol):
    """Called from the launcher's one thread."""

    def say(self, text: str) -> None:
        """Show whole lines."""
        ...

    def report(self, failed: FailedAttempt, text: str) -> None:
        """Show how an attempt failed; ``text`` says it in whole lines."""
        ...

    def end(self, failures: Mapping[int, Failure]) -> None:
        """Take in how ranks of this machine failed in the last attempt, which others may have gone on without."""
        ...
