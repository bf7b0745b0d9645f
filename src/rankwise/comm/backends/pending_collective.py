# SPDX-License-Identifier: Apache-2.0
"""A collective of torch's that has been started: of CPU tensors, waited for; or queued on a device, and followed there.

Ends with the error of the failure detector if a peer fails or does not arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rankwise.health.collective_timeout import SLICE_SECONDS, CollectiveWait
from rankwise.health.diagnosis import is_of_a_signal_handler
from rankwise.health.queued_collectives import order_stream

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    import torch.distributed as dist

    from rankwise.health.failure_detector import FailureDetector
    from rankwise.health.flight_recorder import Ticket


def handle_of(work: dist.Work | None) -> dist.Work:
    """Return torch's handle of a collective that has started."""
    if work is None:
        message = "torch's process group did not return a handle"
        raise RuntimeError(message)
    return work


@dataclass(slots=True, eq=False)
class PendingCollective:
    """A pending collective of CPU tensors."""

    _detector: FailureDetector
    _ticket: Ticket
    _work: dist.Work

    def wait(self) -> None:
        """Return when the result is ready; raise the failure detector's error if it will not be."""
        with CollectiveWait(self._detector, self._ticket) as wait:
            while not self._is_done(SLICE_SECONDS):
                wait.check()

    def _is_done(self, seconds: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if is_of_a_signal_handler(error):
                raise
            if not self._work.is_completed():
                return False
            # It failed, or has completed since the time was up: this tells which, without waiting.
            self._work.wait()
        return True


class QueuedCollective(PendingCollective):
    """A collective that has been queued on the device."""

    __slots__ = ()

    def wait(self) -> None:
        """Have what this thread queues next on the device wait for the result. The CPU does not wait."""
        if self._detector.error is not None:
            raise self._detector.error
        order_stream(self._detector, self._ticket, self._work)


def follow(
    detector: FailureDetector, ticket: Ticket, tensor: torch.Tensor, start: Callable[[], dist.Work | None]
) -> PendingCollective:
    """Start a collective of ``tensor``, and return it, to be waited for.

    Args:
        detector: of this rank.
        ticket: of the collective.
        tensor: what this rank sends.
        start: starts it, and returns torch's handle.

    Raises:
        PeerFailed, PeerMissing: the communicator was aborted.
    """
    if detector.queue is None or tensor.device.type == "cpu":
        return PendingCollective(detector, ticket, handle_of(start()))
    try:
        work = handle_of(start())
    except RuntimeError:
        if detector.error is None:
            raise
        raise detector.error from None
    detector.queue.add(ticket, work)
    return QueuedCollective(detector, ticket, work)
