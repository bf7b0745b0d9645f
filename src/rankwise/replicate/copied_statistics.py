# SPDX-License-Identifier: Apache-2.0
"""Statistics of BatchNorm in copies of replicated models, which each rank takes from its own samples: named once.

A copy is a plain model. One that is called in training mode (``update_bn`` of an averaged model, a teacher) moves its
statistics by this rank's part of the batch. At the end of loops over loaders ranks post summaries of such layers to the
store, and the last rank to do so compares them, so that no rank waits for another. Used by replicate.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from rankwise.comm import optimizer_steps
from rankwise.comm.same_state import CheckSchedule, Posted, alive, unlike_summaries
from rankwise.log import warn
from rankwise.replicate.batchnorm import SYNCHRONISED
from rankwise.tensors.checksum import summary_of
from rankwise.torch_private.modules import BatchNorm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.session import Session

    Summary = tuple[int, int, tuple[float, float], tuple[float, float]]
    """Of one layer: its features, the batches it has seen, and summaries of its two statistics."""

NUM_FIRST = 4
EVERY = 64
"""How many loops apart ranks compare, after the first ones."""


def watch_copies(session: Session) -> None:
    """Compare statistics of copies of replicated models from now on, until a difference was named.

    Called by: every rank that replicates a model with synchronized BatchNorm. Further calls change nothing.
    """
    session.once(_started)


def _started(session: Session) -> _Copies | None:
    posted = Posted.of(session, "rankwise/statistics_of_copies")
    if posted is None:
        return None
    copies = _Copies(posted)
    session.batches.after_loop(copies.compare)
    session.before_save(copies.compare_now)
    session.on_leave(copies.compare_now)
    return copies


class _Copies:
    def __init__(self, posted: Posted) -> None:
        self._posted = posted
        self._schedule = CheckSchedule(NUM_FIRST, EVERY)
        self._num_loops = 0
        self._num_compared = 0
        self._has_warned = False

    def compare(self) -> None:
        """Compare after some of the loops."""
        self._num_loops += 1
        if self._schedule.is_due(self._num_loops - 1):
            self.compare_now()

    def compare_now(self) -> None:
        """Post this rank's summaries; warn if it is the last rank to do so and the ranks differ."""
        if self._has_warned:
            return
        layers = _layers()
        self._num_compared += 1
        # Whatever waits for a lost store reports it.
        with contextlib.suppress(OSError):
            found = self._posted.reports(str(self._num_compared), [_summary(one) for one in layers])
            number = None if found is None else _unlike(list(found.values()), layers)
            if number is not None and self._posted.is_first("told"):
                self._has_warned = True
                self._warn(layers[number])

    def _warn(self, layer: BatchNorm) -> None:
        warn(
            f"{_owner_of(layer)} is not replicated, and its {type(layer).__name__} has running statistics that differ "
            "between ranks, as when each rank calls a copy of a model in training mode with its own samples (update_bn "
            "of an averaged model, a teacher); call copy = rankwise.replicate(copy, sync_batchnorm=True) first, which "
            "takes them from all samples; or copy.eval(), which keeps them",
            all_ranks=True,
        )


def _layers() -> list[BatchNorm]:
    """Return the BatchNorm layers with statistics that no strategy handles, in an order that ranks share."""
    known = optimizer_steps.accounted_modules()
    found = [one for one in alive(BatchNorm) if not issubclass(type(one), SYNCHRONISED) and one not in known]
    return sorted(filter(_is_used, found), key=_summary)


def _is_used(layer: BatchNorm) -> bool:
    count = layer.num_batches_tracked
    return layer.running_mean is not None and count is not None and not count.is_meta and int(count) > 0


def _summary(layer: BatchNorm) -> Summary:
    mean, variance = layer.running_mean, layer.running_var
    if mean is None or variance is None:
        return layer.num_features, 0, (0.0, 0.0), (0.0, 0.0)
    count = layer.num_batches_tracked
    return layer.num_features, 0 if count is None else int(count), summary_of(mean), summary_of(variance)


def _unlike(held: Sequence[Sequence[Summary]], layers: Sequence[BatchNorm]) -> int | None:
    """Return the number of a layer whose statistics differ; ``None`` where ranks have other layers on purpose."""
    shapes = [[one[:2] for one in summaries] for summaries in held]
    if any(one != shapes[0] for one in shapes):
        return None
    dtypes = [torch.float32 if one.running_mean is None else one.running_mean.dtype for one in layers]
    # Of each layer its mean, then its variance.
    values = [[one for summary in summaries for one in summary[2:]] for summaries in held]
    unlike = unlike_summaries(values, [dtype for dtype in dtypes for _ in range(2)])
    return unlike[0] // 2 if unlike else None


def _owner_of(layer: BatchNorm) -> str:
    owners = [one for one in alive(nn.Module) if any(part is layer for part in one.modules())]
    largest = max(owners, key=lambda one: sum(1 for _ in one.modules()), default=layer)
    return type(largest).__name__
