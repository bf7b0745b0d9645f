# SPDX-License-Identifier: Apache-2.0
"""What place() is checked with on an untested torch: a layer fetched from disk, two backwards that add up."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from rankwise.parallel.self_check import gradients, loss_fn

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from torch import nn

    from rankwise.parallel.self_check import Bench, Compared


def trial(place: Callable[[nn.Module, Mapping[str, str], str], nn.Module], bench: Bench) -> Generator[Compared]:
    """Train a small model with ``place``, and yield its gradients.

    Args:
        place: called with a model, a plan and a folder for weights on disk.
        bench: what to train on.
    """
    model, plain = bench.net(2), bench.net(2)
    with tempfile.TemporaryDirectory(prefix="rankwise-place-") as folder:
        model = place(model, {"0": str(bench.device), "1": "disk"}, folder)
        for number in range(2):
            x, y, first, last = bench.batch(number)
            loss_fn(model(x[first:last]), y[first:last]).backward()
            loss_fn(plain(x[first:last]), y[first:last]).backward()
        yield from gradients(model, plain)
