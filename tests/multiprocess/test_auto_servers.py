# SPDX-License-Identifier: Apache-2.0
"""What servers of ``--auto`` keep, and how often calls are proved: neither grows with the length of a script."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING
from unittest import mock

import torch
from served import Run, served
from torch import nn

from rankwise import testing
from rankwise.auto import connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World


def graphs_that_no_backward_follows() -> None:
    model = nn.Linear(4, 2)
    for _ in range(20):
        model(torch.randn(6, 4))


def models_that_are_dropped() -> None:
    for _ in range(8):
        model = nn.Linear(4, 2)
        for _ in range(4):
            model(torch.randn(6, 4)).sum().backward()
        del model
        gc.collect()


def varying_shapes() -> None:
    model = nn.Linear(4, 2)
    for length in range(1, 33):
        model(torch.randn(6, length, 4)).sum().backward()


def _kept(world: World, work: Callable[[], None]) -> Run:
    with mock.patch.object(connection, "_KEY", work.__name__):
        return served(world, work)


def _runs(work: Callable[[], None]) -> tuple[Run, Run]:
    """Return what rank zero did, and what its server had at the end."""
    zero, one = (found.get() for found in testing.run_ranks(_kept, 2, work))
    return zero, one


def test_a_server_drops_graphs_that_rank_zero_has_dropped() -> None:
    zero, server = _runs(graphs_that_no_backward_follows)
    assert zero.num_split >= 4
    assert server.num_graphs <= 2


def test_a_server_drops_models_that_the_script_has_dropped() -> None:
    zero, server = _runs(models_that_are_dropped)
    assert zero.num_split >= 8
    assert server.num_tensors <= 4


def test_calls_are_proved_as_often_whatever_the_shapes_of_their_batches() -> None:
    zero, _ = _runs(varying_shapes)
    assert zero.num_proved == 6
    assert zero.num_split == 26
