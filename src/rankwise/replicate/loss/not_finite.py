# SPDX-License-Identifier: Apache-2.0
"""The first loss that is not finite: on which rank, in which step, and of which samples.

Gradients are averaged, so one rank's NaN is every rank's a moment later. Each rank looks at its own loss; the store
knows which backward was the first. A loss on a device is read in a later step: nothing waits for it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from rankwise.log import warn
from rankwise.world.device.later import check_later

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rankwise.comm.backends.protocol import Amount
    from rankwise.comm.current_batch import CurrentBatch
    from rankwise.comm.session import Session

_KEY = "loss/not_finite"
_MOST_SHOWN = 8


class _Seen:
    """The backward calls since the world was joined."""

    num = 0
    is_over = False
    """Whether this rank has seen a loss that is not finite."""


_seen = _Seen()


def look_at_losses(
    session: Session | None,
    losses: Sequence[torch.Tensor],
    amounts: Collection[Amount | None] = (),
    *,
    parts: Sequence[tuple[int, int]] = (),
    advice: str = "skip such a step on all ranks by rankwise.mean(loss, len(x))",
) -> None:
    """Warn, once per job, on the ranks whose losses are the first ones that are not finite.

    Args:
        session: that is open.
        losses: of this rank.
        amounts: the numbers that they are means over. A mean of nothing is NaN, and counts nothing.
        parts: of each loss, the first one and the number of its samples of this rank; default: all.
        advice: how to skip such a step.
    """
    _seen.num += 1
    if _seen.is_over or session is None or session.store is None:
        return
    number, batch = _seen.num, session.batches.current
    if (batch is not None and batch.num == 0) or 0.0 in [one for one in amounts if not isinstance(one, torch.Tensor)]:
        return
    for place, loss in enumerate(losses):
        if type(loss) is not torch.Tensor or loss.is_meta or not loss.numel():
            continue
        own = _part_of(batch, *parts[place]) if parts and batch is not None else batch
        if loss.device.type != "cpu":
            is_bad = ~loss.detach().isfinite().all()
            for amount in amounts:
                if isinstance(amount, torch.Tensor):
                    is_bad &= (amount != 0).to(is_bad.device)
            check_later(is_bad, partial(_report, "not finite", number, own, session, advice))
        elif not (math.isfinite(loss.item()) if loss.dim() == 0 else bool(loss.detach().isfinite().all())):
            _report(str(loss.item()) if loss.dim() == 0 else "not finite", number, own, session, advice)


def forget_losses() -> None:
    """Look at losses again. Called when the world is left."""
    _seen.num, _seen.is_over = 0, False


def _part_of(batch: CurrentBatch, first: int, num: int) -> CurrentBatch:
    indices = batch.indices
    own = None if indices is None else lambda: list(indices())[first : first + num]
    return replace(batch, start=batch.start + first, num=num, indices=own)


def _report(value: str, number: int, batch: CurrentBatch | None, session: Session, advice: str) -> None:
    if _seen.is_over or session.store is None:
        return
    _seen.is_over = True
    if session.store.held_or_set(_KEY, str(number)) != str(number).encode():
        return  # another rank's was, and has reached this rank with the gradients
    of = f"backward() call {number}" if batch is None else _place(batch)
    warn(
        f"the loss of this rank is {value} in {of}, the first one of any rank that is not finite: gradients are "
        f"averaged, so those of all ranks may be NaN from now on; look at these samples, or {advice}",
        all_ranks=True,
    )


def _place(batch: CurrentBatch) -> str:
    rows = f"its samples {batch.start} to {batch.start + batch.num - 1} of batch {batch.number} of epoch {batch.epoch}"
    indices = [] if batch.indices is None else list(batch.indices())
    shown = ", ".join(map(str, indices[:_MOST_SHOWN])) + (", ..." if len(indices) > _MOST_SHOWN else "")
    return f"{rows} (dataset[{shown}])" if indices else rows
