# SPDX-License-Identifier: Apache-2.0
"""The changes of a round on each worker group, averaged over them while training continues; and the outer optimizer.

Ranks of one worker group that hold copies share the work: each exchanges some of the parameters with the ranks at its
coordinate in the other worker groups and passes the means to its own, so that the slow network carries each once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rankwise.comm.backends.protocol import ChannelSize
from rankwise.compress.allgather_channel import HasErrorFeedback
from rankwise.compress.methods import Narrow, open_channels
from rankwise.errors import ConfigurationError
from rankwise.replicate.bucket import WeightUnit, divide_by_size, plan
from rankwise.torch_private.tensors import foreach_add_, foreach_mul_, foreach_sub_

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import BucketChannel, Exchange
    from rankwise.compress.methods import Method


@dataclass(frozen=True)
class DiLoCo:
    """The mean change of a round is a gradient, with which an outer SGD with Nesterov's momentum takes one step.

    The inner optimizer is the one of the training loop; AdamW in the paper.

    Args:
        lr: of the outer step. 1 without momentum is the plain mean.
        momentum: at least 0, below 1.

    Raises:
        ConfigurationError: a value is outside these bounds.

    Source: Douillard et al., "DiLoCo" (arXiv:2311.08105), algorithm 1, with its values for ``lr`` and ``momentum``;
        torch.optim.SGD(nesterov=True) for the step.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        for name, value in (("lr", self.lr), ("momentum", self.momentum)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigurationError(
                    f"{name} of DiLoCo must be a number, got {value!r}.", do=f"pass a number: DiLoCo({name}=...)"
                )
        if not 0.0 < self.lr < float("inf"):
            raise ConfigurationError(
                f"lr of DiLoCo must be above 0, got {self.lr}.", do="pass lr=0.7, the value of the paper"
            )
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigurationError(
                f"momentum of DiLoCo must be at least 0 and below 1, got {self.momentum}.",
                do="pass momentum=0.9, the value of the paper",
            )


MEAN = "mean"


def outer_of(outer: object) -> DiLoCo | None:
    """Return the optimizer that ``outer=`` names; ``None`` for the plain mean.

    Raises:
        ConfigurationError: there is no such optimizer; the error lists the known ones.
    """
    if isinstance(outer, DiLoCo):
        return outer
    if isinstance(outer, str) and outer in {MEAN, "diloco"}:
        return None if outer == MEAN else DiLoCo()
    raise ConfigurationError(
        f"Unknown outer={outer!r} of local_sgd().",
        do='pass outer="mean", "diloco" or rankwise.DiLoCo(lr=..., momentum=...)',
    )


@torch.no_grad()
def step_outer(
    outer: DiLoCo | None,
    anchors: Sequence[torch.Tensor],
    changes: Sequence[torch.Tensor],
    momentum: Sequence[torch.Tensor],
) -> None:
    """Move ``anchors``, the parameters at the start of a round, by one outer step, in place.

    Args:
        outer: ``None`` for the plain mean.
        anchors: see above.
        changes: the mean of what the worker groups subtracted from them.
        momentum: of earlier rounds, updated in place; empty if there is none.
    """
    if not anchors:
        return
    if outer is None:
        foreach_sub_(list(anchors), list(changes))
        return
    if momentum:
        foreach_mul_(list(momentum), outer.momentum)
        foreach_add_(list(momentum), list(changes))
        foreach_add_(list(anchors), list(momentum), alpha=-outer.lr * outer.momentum)
    foreach_add_(list(anchors), list(changes), alpha=-outer.lr)


class PseudoGradients:
    """The channels of one model between worker groups, reused in every round: :meth:`send`, then :meth:`receive`."""

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        across_groups: Exchange,
        copies: Exchange | None,
        compress: Method | None,
        what: str,
    ) -> None:
        """Open the channels.

        Called by: every rank of ``across_groups`` and ``copies``, with parts of the same shapes.

        Args:
            parts: of each parameter, on this rank.
            across_groups: this rank, and the one at its coordinate in each other worker group; used by nothing else.
            copies: the ranks of this worker group that hold the same parts; used by nothing else.
            compress: how changes are compressed between worker groups.
            what: names the changes in errors.
        """
        self._shapes = [part.shape for part in parts]
        self._copies = copies
        self._what = what
        self.across_groups = across_groups
        self._rank = 0 if copies is None else copies.rank
        num_copies = 1 if copies is None else copies.world_size
        limit_bytes = across_groups.channel_bytes(parts[0].device) if parts else 1
        self._buckets = [
            plan(parts, numbers, limit_bytes, limit_bytes)
            for numbers in divide_by_size([part.nbytes for part in parts], num_copies)
        ]
        """For each of the copies, the numbers of the parameters on each of its channels."""
        self._like = [[parts[numbers[0]] for numbers in channels] for channels in self._buckets]
        own = self._buckets[self._rank]
        sizes = [
            ChannelSize(sum(parts[n].numel() for n in numbers), 0, parts[numbers[0]].dtype, parts[numbers[0]].device)
            for numbers in own
        ]
        shapes = [[parts[number].shape for number in numbers] for numbers in own]
        self._channels: list[BucketChannel] = open_channels(compress, across_groups, sizes, shapes, what) if own else []
        self._unit = WeightUnit(is_open=Narrow("fp16") == compress or any(p.dtype == torch.float16 for p in parts))

    @torch.no_grad()
    def send(self, anchors: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], weight: float) -> None:
        """Start averaging the changes of a round, from ``anchors`` to ``parts``.

        Called by: every rank, with a weight that is the same on all ranks of a worker group.
        """
        if self._unit.is_open and self._channels:
            self._unit.agree(self.across_groups, weight, self._what)
        share = weight / self._unit.size * self._unit.scale
        for channel, numbers in zip(self._channels, self._buckets[self._rank], strict=True):
            channel.claim()
            if share:
                for number, place in zip(numbers, self._views(channel.body, numbers), strict=True):
                    torch.sub(anchors[number], parts[number], out=place)
                channel.body.mul_(channel.factor(share))
            channel.start(share, share, ())

    def move(self) -> None:
        """Advance the exchange as far as possible without waiting."""
        for channel in self._channels:
            # Channels in shared memory advance when they are asked; the answer does not matter.
            channel.can_claim()

    def finish(self) -> None:
        """Wait for the means between worker groups. Called by: every rank."""
        for channel in self._channels:
            channel.finish()

    def forget(self) -> None:
        """Drop the compression error of earlier rounds. Called while no exchange is on its way."""
        for channel in self._channels:
            if isinstance(channel, HasErrorFeedback):
                channel.feedback.left_out.zero_()

    @torch.no_grad()
    def receive(self) -> list[torch.Tensor]:
        """Wait for the means, and return them, one for each part; they stay until the next :meth:`send`.

        Called by: every rank.
        """
        self.finish()
        if self._channels:
            total = float(self._channels[0].total()) / self._unit.scale
            if total > 0:
                self._unit.adjust(total / self.across_groups.world_size)
        means: list[torch.Tensor] = [torch.empty(0)] * len(self._shapes)
        for owner, channels in enumerate(self._buckets):
            for index, numbers in enumerate(channels):
                flat = self._from_owner(owner, index)
                for number, place in zip(numbers, self._views(flat, numbers), strict=True):
                    means[number] = place
        return means

    def _from_owner(self, owner: int, index: int) -> torch.Tensor:
        """Return the means of a channel, which one of the copies has."""
        if self._copies is None:
            return self._channels[index].result
        if owner == self._rank:
            flat = self._channels[index].result
        else:
            num_elements = sum(self._shapes[number].numel() for number in self._buckets[owner][index])
            flat = self._like[owner][index].new_empty(num_elements)
        return self._copies.broadcast(flat, owner, what=self._what)

    def _views(self, flat: torch.Tensor, numbers: Sequence[int]) -> list[torch.Tensor]:
        shapes = [self._shapes[number] for number in numbers]
        pieces = flat.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
