# SPDX-License-Identifier: Apache-2.0
"""Writes what the launcher reports into the folder of the run's report too: failures, restarts, notices.

One line of JSON each, appended as it happens, so that it is there however the launcher exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.health.process_probe import start_time_of
from rankwise.meter import FAILURE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.launch.report.failure import FailedAttempt, Failure
    from rankwise.launch.report.failure_report import Reporter

EVENTS = "events.jsonl"


def launcher_name() -> str:
    """Return what the events of this launcher and the records of its ranks name it by.

    A folder may hold those of other jobs.
    """
    pid = os.getpid()
    return f"{socket.gethostname()}:{pid}:{start_time_of(pid)}"


class RecordingReporter:
    """Passes everything to another reporter, and records it.

    Args:
        inner: what shows it.
        folder: an existing folder.
    """

    def __init__(self, inner: Reporter, folder: str) -> None:
        self._inner = inner
        self._path = Path(folder) / EVENTS

    def show(self, text: str) -> None:
        """Show complete lines."""
        self._record({"kind": "notice", "text": text})
        self._inner.show(text)

    def report(self, failed: FailedAttempt, text: str) -> None:
        """Show how an attempt failed."""
        self._record({"kind": FAILURE, "rank": failed.first.rank, "text": text})
        self._inner.report(failed, text)

    def end(self, failures: Mapping[int, Failure]) -> None:
        """Receive how ranks failed in the last attempt."""
        self._inner.end(failures)

    def _record(self, event: dict[str, object]) -> None:
        # A full disk must not end the job.
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "launcher": launcher_name(), **event}) + "\n")
