# SPDX-License-Identifier: Apache-2.0
"""What shard() is checked with on an untested torch: unequal shares, an accumulation, and a step without zero_grad."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from rankwise.parallel.self_check import gradients, loss_fn
from rankwise.parallel.tensor.calls import tensor_parallel
from rankwise.parallel.trained import no_sync

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import nn

    from rankwise.parallel.self_check import Bench, Compared

STEPS = ((0, 1), (2,))
"""The batches of each step; all but a step's last are accumulated."""


def trial(shard: Callable[[nn.Module], nn.Module], bench: Bench) -> Generator[Compared]:
    """Train a small model with ``shard``, and yield its gradients. Called by: every rank."""
    model, plain = bench.net(2), bench.net(2)
    if bench.tp > 1:
        tensor_parallel(model)
    model = shard(model)
    for step in STEPS:
        xs, ys = [], []
        for number in step:
            x, y, first, last = bench.batch(number)
            xs.append(x)
            ys.append(y)
            with nullcontext() if number == step[-1] else no_sync(model):
                loss_fn(model(x[first:last]), y[first:last]).backward()
        loss_fn(plain(torch.cat(xs)), torch.cat(ys)).backward()
    yield from gradients(model, plain)
