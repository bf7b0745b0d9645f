# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch, the whole batch and shared parameters: gradients of both orders are those of one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from replicas import TOLERANCE

from rankwise.comm.session import current
from rankwise.tools.auto.rows import Share, own_rows, shared_by_ranks, whole_batch

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

Values = list[torch.Tensor]


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, w, unused = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((7, 3), (3, 4), (2,))
    )
    return x, w, unused


def _alone() -> Values:
    x, w, _ = _inputs()
    hidden = torch.tanh(x @ w)
    return _gradients(hidden, x, w)


def _in_parts(world: World) -> Values:
    exchange = current().exchange
    assert exchange is not None
    share = Share(exchange, 7)
    x, w, unused = _inputs()
    shared, not_used = shared_by_ranks([w, unused], exchange)
    hidden = whole_batch(torch.tanh(own_rows(x, 0, share) @ shared), 0, share, (0, 1))
    found = _gradients(hidden, x, w)
    assert unused.grad is None
    assert not_used.requires_grad
    # Along another dim, and without gradients.
    whole = torch.arange(14.0).view(2, 7)
    with torch.no_grad():
        again = whole_batch(own_rows(whole, 1, share), 1, share, (1, 0))
        assert torch.equal(again, whole)
        assert again.stride() == (1, 2)
    assert world.world_size > 1
    return found


def _gradients(hidden: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Values:
    """Return a loss that couples samples, a gradient penalty, and the gradients of both."""
    loss = (hidden @ hidden.T).logsumexp(1).mean()
    by_x, by_w = torch.autograd.grad(loss, (x, w), create_graph=True)
    total = loss + by_x.square().sum() + by_w.norm()
    total.backward()
    assert x.grad is not None
    assert w.grad is not None
    return [loss.detach(), by_x.detach(), by_w.detach(), total.detach(), x.grad, w.grad]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gradients_of_both_orders_are_those_of_one_device(run_ranks: RunRanks, num_ranks: int) -> None:
    expected = _alone()
    for result in run_ranks(_in_parts, num_ranks):
        for one, other in zip(result.value, expected, strict=True):
            assert torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)
