# SPDX-License-Identifier: Apache-2.0
"""When gradients of compiled models are sent: while backward runs, also where the whole model is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.registry import lookup_backend

import rankwise as rw
from rankwise.comm.backends import torch_group
from rankwise.comm.session import current
from rankwise.replicate import gradient_buckets
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

WIDTH = 512
NUM_BLOCKS = 4
BUCKET_BYTES = 2**20
"""The weight of a block, and the least that the compiler splits at."""


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


def _compiled(model: Blocks, how: str) -> nn.Module:
    """Return a model that is replicated and compiled."""
    if how == "after":
        return torch.compile(rw.replicate(model), backend="aot_eager")
    if how == "fullgraph":
        return rw.replicate(torch.compile(model, backend="aot_eager", fullgraph=True))
    for one in {"blocks": model.blocks, "model": [model], "nothing": []}[how]:
        one.compile(backend="aot_eager")
    return rw.replicate(model)


def _buckets_sent_before_the_last_block(world: World, how: str, splits: bool) -> int:
    """Return how many buckets of the second step are sent when backward reaches the first block, which is last."""
    gradient_buckets.FIRST_BUCKET_BYTES = torch_group.CPU_CHANNEL_BYTES = BUCKET_BYTES
    dynamo_config.optimize_ddp = splits
    events: list[str] = []
    model = _compiled(Blocks(_marking(events)), how)
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


@pytest.mark.parametrize("how", ["nothing", "blocks", "model", "after", "fullgraph"])
def test_buckets_are_sent_while_backward_runs(how: str) -> None:
    for result in run_ranks(_buckets_sent_before_the_last_block, 2, how, True, exchange="gloo"):
        # The last block's own weight and what its bucket shares with it are complete only afterwards.
        assert result.get() >= NUM_BLOCKS - 1


def test_the_users_setting_keeps_a_compiled_model_whole() -> None:
    for result in run_ranks(_buckets_sent_before_the_last_block, 2, "model", False, exchange="gloo"):
        assert result.get() == 0


def _train_unequal_batches(world: World, compiled: bool) -> tuple[list[int], torch.Tensor]:
    """Return how many graphs each step compiled, and the weights after all steps."""
    gradient_buckets.FIRST_BUCKET_BYTES = torch_group.CPU_CHANNEL_BYTES = BUCKET_BYTES
    graphs: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    torch.manual_seed(0)
    model = rw.replicate(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]).double())
    call = torch.compile(model, backend=backend) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_graphs = []
    for num_rows in (4, 3, 5):
        rows = torch.randn(num_rows, WIDTH, dtype=torch.float64)
        graphs.clear()
        call(rows[world.rank :: world.world_size]).square().mean().backward()
        num_graphs.append(len(graphs))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        graphs.clear()
        call(rows)
        num_graphs.append(len(graphs))
    return num_graphs, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_split_model_trains_as_one_rank_does() -> None:
    _, expected = run_ranks(_train_unequal_batches, 1, False)[0].get()
    for result in run_ranks(_train_unequal_batches, 2, True, exchange="gloo"):
        num_graphs, weights = result.get()
        assert num_graphs[0] == 3  # one per bucket
        assert num_graphs[-1] == 1  # in evaluation nothing is sent
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
