# SPDX-License-Identifier: Apache-2.0
"""What pipeline() is checked with on an untested torch: two steps that add up, pipelines with unequal shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.parallel.self_check import gradients, loss_fn

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import torch
    from torch import nn

    from rankwise.parallel.pipeline.steps import Pipeline
    from rankwise.parallel.self_check import Bench, Compared


def trial(
    pipeline: Callable[[nn.Module, torch.Tensor, Sequence[str]], Pipeline], num_stages: int, bench: Bench
) -> Generator[Compared]:
    """Train a small model with ``pipeline``, and yield the gradients of this rank's stages. Called by: every rank.

    Args:
        pipeline: called with a model, an example and the names that the stages begin with.
        num_stages: of all ranks of a pipeline together.
        bench: what to train on.
    """
    model, plain = bench.net(num_stages), bench.net(num_stages)
    if bench.tp > 1:
        from rankwise.parallel.tensor.calls import tensor_parallel  # noqa: PLC0415 - takes long

        tensor_parallel(model)
    x, _, first, last = bench.batch(0)
    step = pipeline(model, x[first:last], [str(number) for number in range(1, num_stages)])
    for number in range(2):
        x, y, first, last = bench.batch(number)
        step(x[first:last], y[first:last])
        loss_fn(plain(x), y).backward()
    yield from gradients(model, plain)
