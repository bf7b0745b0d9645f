# SPDX-License-Identifier: Apache-2.0
"""One AdamW step while other processes use the same cores: rankwise against a hand-written DistributedDataParallel.

Next to each rank run either 2 loader workers, whose work for a batch is what a step without exchange costs, or 2
processes that never wait for anything. With workers a step takes the processor time of both: waiting costs nothing, as
another process computes meanwhile, but spinning does. With processes that never wait, a rank gets its share of a core,
and waits until its turn.

Both sides run in the same processes, epoch by epoch in turn; the other side's workers have nothing to read meanwhile.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
import zlib
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from measure import Row, interleaved, median_ratio, seconds, show
from models import MODELS
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import rankwise as rw
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from rankwise.world.facts import World

NUM_WORKERS = 2
WARM_UPS = 2
REPETITIONS = 12
STEPS = {"60 small layers": 40, "wide MLP": 12, "transformer": 8}
"""Of an epoch."""
LOADER_WORKERS = f"{NUM_WORKERS} loader workers per rank"
BUSY_PROCESSES = f"{NUM_WORKERS} busy processes per rank"
REACH = {"60 small layers": 0.80, "wide MLP": 0.75, "transformer": 0.90}
"""The ratios to stay at or below with loader workers; of two ranks."""
_COMPRESSED = zlib.compress(torch.randint(0, 16, (2**14,), dtype=torch.uint8).numpy().tobytes())


class Compressed(Dataset[torch.Tensor]):
    """Samples whose reading takes some decompressions each."""

    def __init__(self, samples: torch.Tensor, num_decompressions: int) -> None:
        self._samples, self._num_decompressions = samples, num_decompressions

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        for _ in range(self._num_decompressions):
            zlib.decompress(_COMPRESSED)
        return self._samples[index]


def decompress_forever() -> None:
    while True:
        zlib.decompress(_COMPRESSED)


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Have processes of this rank compute meanwhile."""
    processes = [get_context("fork").Process(target=decompress_forever, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every side."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[torch.Tensor]) -> None:
    """Take a step on every batch."""
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def median_cost(call: Callable[[], object], repetitions: int) -> float:
    """Return how many seconds of a core a call takes."""
    costs = []
    for _ in range(repetitions):
        started = time.thread_time()
        call()
        costs.append(time.thread_time() - started)
    return statistics.median(costs)


def decompressions_of_a_step(name: str) -> int:
    """Return how many decompressions cost as much as a step without exchange; the same on every rank."""
    model, shape = MODELS[name]()
    rw.independent(model)
    step = median_cost(partial(train, model, adamw(model), [torch.randn(shape)]), 20)
    return round(rw.all_reduce(step / median_cost(partial(zlib.decompress, _COMPRESSED), 500), op="mean"))


def loaders(world: World, name: str) -> dict[str, Callable[[], Iterable[torch.Tensor]]]:
    """Return for each side what gives the batches of its next epoch, read by workers."""
    local_batch_size, *shape = MODELS[name]()[1]
    dataset = Compressed(
        torch.randn(local_batch_size * world.world_size * STEPS[name], *shape),
        max(1, round(decompressions_of_a_step(name) / local_batch_size)),
    )
    ours = rw.DataLoader(
        dataset, local_batch_size=local_batch_size, shuffle=True, num_workers=NUM_WORKERS, persistent_workers=True
    )
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(dataset)
    peers = DataLoader(
        dataset, batch_size=local_batch_size, sampler=sampler, num_workers=NUM_WORKERS, persistent_workers=True
    )
    epochs = iter(range(10**9))

    def next_epoch() -> Iterable[torch.Tensor]:
        sampler.set_epoch(next(epochs))
        return peers

    return {"rankwise": lambda: ours, "ddp": next_epoch}


def compare(world: World, name: str, others: str) -> dict[str, list[float]]:
    """Return seconds per step of both sides, epoch by epoch."""
    build, num_steps = MODELS[name], STEPS[name]

    def epochs_of(model: nn.Module, next_epoch: Callable[[], Iterable[torch.Tensor]]) -> Callable[[], float]:
        optimizer = adamw(model)

        def epoch() -> float:
            batches = next_epoch()
            dist.barrier()
            started = time.perf_counter()
            train(model, optimizer, batches)
            return (time.perf_counter() - started) / num_steps

        return epoch

    has_loaders = others == LOADER_WORKERS
    if has_loaders:
        batches_of = loaders(world, name)
    else:
        in_memory = [torch.randn(build()[1]) for _ in range(num_steps)]
        batches_of = dict.fromkeys(("rankwise", "ddp"), lambda: in_memory)
    sides = {
        "rankwise": epochs_of(rw.replicate(build()[0]), batches_of["rankwise"]),
        "ddp": epochs_of(DistributedDataParallel(build()[0]), batches_of["ddp"]),
    }
    with busy_processes(0 if has_loaders else NUM_WORKERS):
        interleaved(sides, WARM_UPS)
        return interleaved(sides, REPETITIONS)


def measure(name: str, others: str, num_ranks: int) -> Row:
    """Return the row of one model."""
    figures = run_ranks(compare, num_ranks, name, others, timeout_seconds=900)[0].get()
    has_reach = num_ranks == 2 and others == LOADER_WORKERS
    return Row(
        f"AdamW step, {name}, {num_ranks} ranks, {others}, against DDP",
        seconds(statistics.median(figures["rankwise"])),
        seconds(statistics.median(figures["ddp"])),
        median_ratio(figures["rankwise"], figures["ddp"]),
        REACH[name] if has_reach else math.inf,
    )


if __name__ == "__main__":
    chosen = [name for name in MODELS if any(word in name for word in sys.argv[1:])] or list(MODELS)
    show(
        [
            measure(name, others, num_ranks)
            for name in chosen
            for others in (LOADER_WORKERS, BUSY_PROCESSES)
            for num_ranks in (2, 4)
        ]
    )
