# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step goes, as the core reports it: which part of a step begins, and that it is over.

Silent unless ``insight`` measures: ``join``, or a launcher's rank before its script, has :func:`listener` start that.
"""

from __future__ import annotations

import os
import time
import traceback
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankwise.errors import PeerFailed, PeerMissing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

PARTS = ("script", "data", "forward", "backward", "exchange", "optimizer", "checkpoint", "evaluation")
"""What a rank spends the time of a step on. ``exchange`` is waiting for other ranks, or for what they send."""
SCRIPT, DATA, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER, CHECKPOINT, EVALUATION = range(len(PARTS))
FAILURE = "failure"
"""The kind of what a rank, or its launcher, notes where it fails."""
SUFFIX = ".steps"
LISTENER = "rankwise.insight.measuring"
"""What measures, by name: the core imports no room of the rest."""


class Meter:
    """Measures nothing: what a rank has that does not measure its steps."""

    part = SCRIPT
    """The part of the step that is under way."""
    folder: Path | None = None
    """Of the report, if the run was given one."""

    @property
    def step(self) -> int:
        """The number of the step that is under way, from 1; 0 if steps are not measured."""
        return 0

    def enter(self, part: int) -> int:
        """Record that a part of the step begins; return the part before, for :meth:`resume`."""
        return part

    def arrive(self, part: int) -> int:
        """Record that this rank has computed its gradients, and depends on the others from here on; else as enter."""
        return part

    def resume(self, part: int, *, samples: int = 0, has_updated: bool = False) -> None:
        """Record that the part of the step that has begun last is over, and ``part``, the one before it, continues.

        ``samples`` were taken in it by this rank; ``has_updated`` if it was an optimizer's update.
        """

    def spending(self, part: int) -> AbstractContextManager[None]:
        """Count the time inside the block as a part of the step."""
        del part
        return nullcontext()

    def note(self, kind: str, **values: object) -> None:
        """Record something that happens rarely: JSON values, by name."""

    def note_event(self, text: str) -> None:
        """Record something that happened on this rank, for the report of the run."""

    def show_values(self, values: Mapping[str, tuple[float | None, float]]) -> None:
        """Show the last values that were logged, by name: this rank's own if it has one, and the mean of all."""

    def close(self) -> None:
        """Complete the record."""


_SILENT = Meter()
current = _SILENT
"""The meter of this process."""
_of_parent: list[Meter] = []
"""The meter of the process that forked this one. Kept: where an event of a GPU is destroyed in a forked process, torch
ends the process."""


def start(new: Meter) -> None:
    """Measure with ``new`` from now on."""
    global current  # noqa: PLW0603 - a call through a function costs as much as what the meter does
    current = new


def pause() -> None:
    """Measure nothing until :func:`start`; the record stays open."""
    start(_SILENT)


def stop() -> None:
    """Stop measuring, and close the record."""
    measuring = current
    pause()
    measuring.close()


def _leave_to_parent() -> None:
    """Measure nothing in a forked process, such as a worker of a loader: it is not the rank."""
    _of_parent.append(current)
    pause()


os.register_at_fork(after_in_child=_leave_to_parent)


def listener() -> Any:  # a module of the rest
    """Return the module that starts measurements of this rank."""
    return import_module(LISTENER)


def is_silent() -> bool:
    """Return whether this rank does not measure its steps."""
    return current is _SILENT


def note_layout(what: str, **values: object) -> None:
    """Record how ranks or a model are laid out, for pictures of the run: JSON values, by name."""
    current.note("layout", what=what, **values)


def note_failure(error: BaseException, rank: int) -> None:
    """Record that ``rank``, this one, ends with ``error``, with the ranks whose failure it is, as far as known."""
    is_of_another = isinstance(error, PeerFailed | PeerMissing)
    if isinstance(error, PeerFailed | PeerMissing):
        ranks = [error.rank] if isinstance(error, PeerFailed) else list(error.ranks)
        text = f"{type(error).__name__}: {error}"
    else:
        ranks, text = [rank], "".join(traceback.format_exception(error))
    current.note(FAILURE, time=time.time(), text=text, ranks=ranks, is_of_another=is_of_another)


def record_path(folder: Path, job: str, attempt: int, rank: int) -> Path:
    """Return the file in the folder of a report that holds a rank's record of one attempt of a job."""
    return folder / f"{job or 'job'}-attempt-{attempt}-rank-{rank:05d}{SUFFIX}"
