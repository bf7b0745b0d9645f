# SPDX-License-Identifier: Apache-2.0
"""Decides whether the end of an attempt is followed by a restart of all ranks or the end of the job.

Values only. Imported by the coordinator, which carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.health.preemption import STOPPED_EXIT_CODE


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """The facts about the end of an attempt that the decision depends on."""

    has_failed: bool
    """Whether a rank failed that the others cannot continue without."""
    is_lost_node: bool = False
    """Whether no rank failed by itself: all failures are ranks lost with their machine."""
    exit_code: int = 0
    """Of the first rank to fail."""
    has_stopped: bool = False
    """Whether a rank saved and stopped, as requested."""
    is_to_grow: bool = False
    """Whether it was ended for machines that have joined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """Start all ranks again."""

    reason: str
    """For people."""
    reports_failure: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """End the job."""

    exit_code: int
    reports_failure: bool = False


class RestartPolicy:
    """How many restarts a job has after failures, and when it takes one."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._num_used = 0

    @property
    def has_left(self) -> bool:
        """Whether another failure may be followed by a restart."""
        return self._num_used < self._max_restarts

    def after(self, ended: AttemptEnd, *, can_continue_without: bool, stop_requested: bool) -> Restart | Finish:
        """Return what follows.

        Args:
            ended: the attempt.
            can_continue_without: whether the remaining machines are enough for the job.
            stop_requested: whether the ranks were asked to save and exit: then nothing restarts.
        """
        if ended.has_failed and not (ended.is_lost_node and can_continue_without):
            if not self.has_left:
                return Finish(exit_code=ended.exit_code or 1, reports_failure=True)
            self._num_used += 1
            restart = Restart(reason=f"restart {self._num_used} of {self._max_restarts}", reports_failure=True)
        elif ended.has_failed:
            restart = Restart(reason="continuing without the lost node")
        elif ended.is_to_grow:
            restart = Restart(reason="restarting with the nodes that have joined")
        else:
            return Finish(exit_code=STOPPED_EXIT_CODE if ended.has_stopped else 0)
        if stop_requested:
            return Finish(exit_code=STOPPED_EXIT_CODE, reports_failure=restart.reports_failure)
        return restart
