# SPDX-License-Identifier: Apache-2.0
"""When gradients of compiled models are sent: between compiled blocks, or once a compiled model's backward is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.comm.backends import torch_group
from rankwise.comm.session import current
from rankwise.parallel.core import gradient_buckets
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

WIDTH = 16
NUM_BLOCKS = 4


class Block(nn.Module):
    """A layer, and an operation whose backward is noted where the compiler cannot see it."""

    def __init__(self, mark: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.mark = mark

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mark(self.layer(x).tanh())


class Blocks(nn.Module):
    """A few blocks, of which backward reaches the first one last."""

    def __init__(self, mark: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(mark) for _ in range(NUM_BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _marking(events: list[str]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the identity as an operation that notes in ``events`` when its backward runs."""

    @torch.library.custom_op("overlap::mark", mutates_args=())
    def mark(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @torch.library.custom_op("overlap::mark_backward", mutates_args=())
    def mark_backward(gradient: torch.Tensor) -> torch.Tensor:
        events.append("block")
        return gradient.clone()

    mark.register_fake(torch.empty_like)
    mark_backward.register_fake(torch.empty_like)
    mark.register_autograd(lambda _, gradient: mark_backward(gradient))
    return mark


def _buckets_sent_before_the_last_block(world: World, compiled: str) -> int:
    """Return how many buckets of the second step are sent when backward reaches the first block, which is last."""
    gradient_buckets.FIRST_BUCKET_BYTES = torch_group.CPU_CHANNEL_BYTES = 64
    events: list[str] = []
    model = Blocks(_marking(events))
    if compiled == "blocks":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    elif compiled == "model":
        model.compile(backend="aot_eager")
    rw.replicate(model)
    detector = current().detector
    assert detector is not None
    ticket = detector.ticket

    def noting(what: str, *args: Any) -> Any:
        events.append(what)
        return ticket(what, *args)

    detector.ticket = noting  # type: ignore[method-assign]
    for _ in range(2):
        loss = model(torch.ones(3, WIDTH) * (world.rank + 1)).square().mean()
        events.clear()
        loss.backward()
    last = len(events) - events[::-1].index("block")
    assert events.count("block") == NUM_BLOCKS
    return len([what for what in events[:last] if "bucket" in what])


@pytest.mark.parametrize("compiled", ["nothing", "blocks"])
def test_buckets_are_sent_between_compiled_blocks(compiled: str) -> None:
    for result in run_ranks(_buckets_sent_before_the_last_block, 2, compiled, exchange="gloo"):
        assert result.get() >= NUM_BLOCKS - 1


def test_a_model_compiled_as_a_whole_sends_all_at_the_end() -> None:
    for result in run_ranks(_buckets_sent_before_the_last_block, 2, "model", exchange="gloo"):
        assert result.get() == 0
