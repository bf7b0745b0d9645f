# SPDX-License-Identifier: Apache-2.0
"""Cost of drawing random numbers as one rank would: a training step against the same step with torch's own draws."""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING

import torch
from measure import Row, interleaved, machine, median_ratio, seconds, show
from torch import nn

import rankwise as rw
from rankwise import testing
from rankwise.comm.session import current
from rankwise.replicate.random_numbers import kernels, scope
from rankwise.replicate.random_numbers.model_draws import DrawsOfModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

ROUNDS = 12
WIDTH, TRANSFORMER_WIDTH = 64, 256


class Small(nn.Module):
    """Sixty small layers."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(60))
        self.probability = probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            if self.probability:
                x = nn.functional.dropout(x, self.probability)
        return x


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(TRANSFORMER_WIDTH, 4, 4 * TRANSFORMER_WIDTH, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, float]] = {
    "60 small layers with dropout": (lambda: Small(0.1), (WIDTH, WIDTH), 10, 1.10),
    "60 small layers that draw nothing": (lambda: Small(0.0), (WIDTH, WIDTH), 10, 1.01),
    "transformer with dropout": (transformer, (8, 64, TRANSFORMER_WIDTH), 3, 1.02),
}


def steps(world: World, name: str) -> dict[str, list[float]]:
    """Return the times of a step, in seconds, with each way to draw."""
    torch.set_num_threads(1)
    make, shape, count, _ = MODELS[name]
    model = rw.replicate(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(2 * shape[0] * world.world_size, *shape[1:])
    x = next(iter(rw.DataLoader(data, global_batch_size=shape[0] * world.world_size)))
    before, after = DrawsOfModel.before, DrawsOfModel.after

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def timed() -> float:
        step()
        rw.barrier()
        start = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - start) / count

    def as_one_rank() -> float:
        DrawsOfModel.before, DrawsOfModel.after = before, after  # type: ignore[method-assign]
        kernels.install(current())
        return timed()

    def as_torch() -> float:
        DrawsOfModel.before = lambda *_: scope.enter(None)  # type: ignore[method-assign]
        DrawsOfModel.after = lambda *_: scope.leave()  # type: ignore[method-assign]
        kernels.put_back()
        return timed()

    return interleaved({"as one rank": as_one_rank, "as torch": as_torch}, ROUNDS)


def main() -> None:
    if "--json" not in sys.argv:
        print(machine())
    rows = []
    for name, (_, _, _, reach) in MODELS.items():
        for num_ranks in (1, 2):
            figures = testing.run_ranks(steps, num_ranks, name)[0].get()
            ours, peers = figures["as one rank"], figures["as torch"]
            rows.append(
                Row(
                    f"a step of {name} on {num_ranks} rank(s): numbers of one rank, beside torch's own",
                    seconds(statistics.median(ours)),
                    seconds(statistics.median(peers)),
                    median_ratio(ours, peers),
                    reach,
                )
            )
    show(rows)


if __name__ == "__main__":
    main()
