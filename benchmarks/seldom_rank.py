# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/seldom.py: trains a perceptron on digits with each strategy in turn, in a new world each."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import rankwise as rw
from rankwise import World

WIDTH = 1024
"""Of both hidden layers: 1.1 million parameters, 4.5 MB of gradients."""
NUM_TRAINED = 1437
"""Of the 1797 digits; the others are the test."""
LEARNING_RATE = 1e-3
EVERY = 10
"""Steps between two exchanges of the strategies that exchange rarely."""
CHECK_STEPS = 2
"""Steps between two looks at the accuracy, of the ways that exchange in every step."""
MAX_STALENESS = 16
SLOWED = 4.0
"""How many times longer a slowed rank takes for its gradients."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training.

    Args:
        way: a name in ``WAYS``.
        num_steps: after which it ends; a step is of every rank that trains.
        accuracy: on the test digits, at which it ends earlier.
        global_batch_size: digits per step of all ranks.
        seed: of the parameters and of the order.
        sgd_rate: learning rate of plain SGD, in the place of Adam: late gradients do little to it.
        slowed: the rank that is ``SLOWED`` times slower.
        num_ranks: how many take part, from the first; the others wait for the next run.
        mark: a file that says to ranks that look at other parameters that the accuracy is reached.
    """

    way: str
    num_steps: int
    accuracy: float | None = None
    global_batch_size: int = 96
    seed: int = 0
    sgd_rate: float | None = None
    slowed: int | None = None
    num_ranks: int | None = None
    mark: str = ""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How it went on one rank."""

    seconds: float
    """Of the training loop, looks at the accuracy not counted."""
    num_steps: int
    is_reached: bool
    sent_bytes: int
    received_bytes: int
    """By this host's network card, over the loop."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model made ready for one way of training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    check_steps: int = CHECK_STEPS
    """Steps between two looks at the accuracy."""
    is_alike: bool = True
    """Whether all ranks have the same parameters at such a look."""


Way = Callable[[nn.Module, World, Run], Training]


def _optimizer(model: nn.Module, run: Run, num_updates: int = 1) -> torch.optim.Optimizer:
    """Return the optimizer for so many updates where one rank would make one."""
    if run.sgd_rate is not None:
        return torch.optim.SGD(model.parameters(), lr=run.sgd_rate / num_updates)
    return torch.optim.Adam(model.parameters(), lr=LEARNING_RATE / num_updates)


def _ddp(model: nn.Module, _: World, run: Run) -> Training:
    return Training(model=DistributedDataParallel(model), optimizer=_optimizer(model, run))


def _replicate(compress: str | None) -> Way:
    def way(model: nn.Module, _: World, run: Run) -> Training:
        return Training(model=rw.replicate(model, compress=compress), optimizer=_optimizer(model, run))

    return way


def _seldom(outer: str) -> Way:
    def way(model: nn.Module, _: World, run: Run) -> Training:
        optimizer = _optimizer(model, run)
        rw.local_sgd(model, every=EVERY, outer=outer, overlap=0)
        return Training(model=model, optimizer=optimizer, check_steps=EVERY)

    return way


def _server(mode: str, max_staleness: int | None = None) -> Way:
    def way(model: nn.Module, world: World, run: Run) -> Training:
        is_async = mode == "async"
        # A step of all workers together is one update, or one for each of them by its own share of the batch.
        num_updates = world.world_size - 1 if is_async else 1
        optimizer = _optimizer(model, run, num_updates)
        rw.parameter_server(model, optimizer, servers=1, mode=mode, max_staleness=max_staleness)
        return Training(model=model, optimizer=optimizer, is_alike=not is_async)

    return way


WAYS: dict[str, Way] = {
    "DDP": _ddp,
    "replicate": _replicate(None),
    "bf16": _replicate("bf16"),
    "int8": _replicate("int8"),
    "powersgd": _replicate("powersgd"),
    "top-k": _replicate("top-k"),
    "local_sgd": _seldom("mean"),
    "diloco": _seldom("diloco"),
    "server, sync": _server("sync"),
    "server, async": _server("async"),
    "server, stale": _server("async", MAX_STALENESS),
}


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images [1797, 64] and labels [1797], mixed."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]


def _build() -> nn.Module:
    hidden = (nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


def _card() -> tuple[int, int]:
    """Return the bytes that this host's network card has sent and received."""
    statistics = Path("/sys/class/net/eth0/statistics")
    sent, received = (int((statistics / name).read_text(encoding="ascii")) for name in ("tx_bytes", "rx_bytes"))
    return sent, received


def train(world: World, run: Run) -> Ran:
    """Train once.

    Called by: every rank.
    """
    images, labels = _digits()
    torch.manual_seed(run.seed)
    training = WAYS[run.way](_build(), world, run)
    # One long epoch: its end is something to wait for, and what is measured is the steps.
    numbers = torch.arange(run.num_steps * run.global_batch_size) % NUM_TRAINED
    loader = rw.DataLoader(
        TensorDataset(images[numbers], labels[numbers]),
        global_batch_size=run.global_batch_size,
        shuffle=True,
        seed=run.seed,
    )
    mark = Path(run.mark)
    num_steps, is_reached = 0, False
    rw.barrier()
    sent, received = _card()
    started = time.perf_counter()
    for x, y in loader:
        step_started = time.perf_counter()
        F.cross_entropy(training.model(x), y).backward()
        if world.rank == run.slowed:
            time.sleep((SLOWED - 1) * (time.perf_counter() - step_started))
        training.optimizer.step()
        training.optimizer.zero_grad()
        num_steps += 1
        if run.accuracy is None:
            continue
        if num_steps % training.check_steps == 0 and (training.is_alike or world.rank == 0):
            looked = time.perf_counter()
            with torch.no_grad():
                right = training.model(images[NUM_TRAINED:]).argmax(1) == labels[NUM_TRAINED:]
            is_reached = float(right.double().mean()) >= run.accuracy
            started += time.perf_counter() - looked
        if is_reached and not training.is_alike:
            mark.touch()
        if is_reached or (not training.is_alike and mark.exists()):
            break
    seconds = time.perf_counter() - started
    sent_then, received_then = _card()
    return Ran(
        seconds=seconds,
        num_steps=num_steps,
        is_reached=is_reached,
        sent_bytes=sent_then - sent,
        received_bytes=received_then - received,
    )


def _warm_up() -> None:
    """Have torch load what it loads when it is first used."""
    parameter = torch.zeros(2, requires_grad=True)
    parameter.sum().backward()
    torch.optim.Adam([parameter]).step()
    torch.linalg.qr(torch.eye(4))


def main() -> None:
    torch.set_num_threads(1)
    _warm_up()
    runs = [Run(**fields) for fields in json.loads(sys.argv[1])]
    first_port, rank, world_size = (int(os.environ[name]) for name in ("MASTER_PORT", "RANK", "WORLD_SIZE"))
    ran: list[Ran | None] = []
    for number, run in enumerate(runs):
        num_ranks = run.num_ranks or world_size
        # A world of its own for each, and no port twice: the store before may not have gone. Every process joins as
        # often as the others, those that are left out a world of their own: joins are numbered.
        takes_part = rank < num_ranks
        place = (rank, num_ranks) if takes_part else (0, 1)
        os.environ.update(MASTER_PORT=str(first_port + number), RANK=str(place[0]), WORLD_SIZE=str(place[1]))
        with rw.join() as world:
            ran.append(train(world, run) if takes_part else None)
    print(json.dumps([one and asdict(one) for one in ran]))


if __name__ == "__main__":
    main()
