# SPDX-License-Identifier: Apache-2.0
"""What tensor_parallel() is checked with on an untested torch: two backwards that add up, of batches of two sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.parallel.self_check import gradients, loss_fn

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import nn

    from rankwise.parallel.self_check import Bench, Compared


def trial(tensor_parallel: Callable[[nn.Module], nn.Module], bench: Bench) -> Generator[Compared]:
    """Train a small model with ``tensor_parallel``, and yield its gradients. Called by: every rank."""
    model, plain = tensor_parallel(bench.net(2)), bench.net(2)
    model.eval()  # In training mode ranks with samples of their own would have to be averaged over.
    for number in range(2):
        # The ranks along tp see the same samples.
        x, y, first, last = bench.batch(number)
        loss_fn(model(x[first:last]), y[first:last]).backward()
        loss_fn(plain(x[first:last]), y[first:last]).backward()
    yield from gradients(model, plain)
