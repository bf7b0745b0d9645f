# SPDX-License-Identifier: Apache-2.0
"""Statistics of BatchNorm in copies of replicated models, which each rank takes from its own samples: named once.

A copy is a plain model. One that is called in training mode (``update_bn`` of an averaged model, a teacher) moves its
statistics by this rank's part of the batch. At the end of loops over loaders ranks post summaries of such layers to the
store, and the last rank to do so compares them, so that no rank waits for another. Used by replicate.
"""

from __future__ import annotations

import contextlib
import gc
import json
from typing import TYPE_CHECKING

import torch
from torch import nn

from rankwise.comm import optimizer_steps
from rankwise.log import warn
from rankwise.parallel.core.batchnorm import SYNCHRONISED
from rankwise.parallel.state_guard.guard import CheckSchedule
from rankwise.tensors.rounding import is_rounding, summary_of, tolerance
from rankwise.torch_private.modules import BatchNorm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.session import Session
    from rankwise.store.values import Store

    Summary = tuple[int, int, tuple[float, float], tuple[float, float]]
    """Of one layer: its features, the batches it has seen, and summaries of its two statistics."""

NUM_FIRST = 4
EVERY = 64
"""How many loops apart ranks compare, after the first ones."""
ANSWER_SECONDS = 10.0
"""How long the store may take to return a key that is set."""


def watch_copies(session: Session) -> None:
    """Compare statistics of copies of replicated models from now on, until a difference was named.

    Called by: every rank that replicates a model with synchronized BatchNorm. Further calls change nothing.
    """
    session.once(_started)


def _started(session: Session) -> _Copies | None:
    if session.store is None:
        return None
    copies = _Copies(session.store.prefixed("rankwise/statistics_of_copies"), session)
    session.after_loop(copies.compare)
    session.before_save(copies.compare_now)
    session.on_leave(copies.compare_now)
    return copies


class _Copies:
    def __init__(self, store: Store, session: Session) -> None:
        self._store = store
        self._world = session.world
        self._schedule = CheckSchedule(NUM_FIRST, EVERY)
        self._num_loops = 0
        self._num_compared = 0
        self._has_warned = False

    def compare(self) -> None:
        """Compare after some of the loops."""
        step = self._num_loops
        self._num_loops += 1
        if step >= self._schedule.next:
            self._schedule.advance(step)
            self.compare_now()

    def compare_now(self) -> None:
        """Post this rank's summaries; warn if it is the last rank to do so and the ranks differ."""
        if self._has_warned:
            return
        layers = _layers()
        self._num_compared += 1
        part = self._store.prefixed(str(self._num_compared))
        # Whatever waits for a lost store reports it.
        with contextlib.suppress(OSError):
            part.set(str(self._world.rank), json.dumps([_summary(one) for one in layers]))
            if part.add("count", 1) < self._world.world_size:
                return
            held = [json.loads(part.get(str(rank), ANSWER_SECONDS)) for rank in range(self._world.world_size)]
            number = _unlike(held, layers)
            if number is not None and self._store.add("told", 1) == 1:
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
    found = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), BatchNorm) and not issubclass(type(one), SYNCHRONISED) and one not in known
    ]
    return sorted((one for one in found if _is_used(one)), key=_summary)


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
    for number, layer in enumerate(layers):
        dtype = torch.float32 if layer.running_mean is None else layer.running_mean.dtype
        own = held[0][number]
        for other in (summaries[number] for summaries in held[1:]):
            pairs = zip(own[2:], other[2:], strict=True)
            if not all(is_rounding((a[0], a[1]), (b[0], b[1]), tolerance(dtype)) for a, b in pairs):
                return number
    return None


def _owner_of(layer: BatchNorm) -> str:
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    owners = [one for one in modules if any(part is layer for part in one.modules())]
    largest = max(owners, key=lambda one: sum(1 for _ in one.modules()), default=layer)
    return type(largest).__name__
