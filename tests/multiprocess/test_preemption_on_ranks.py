# SPDX-License-Identifier: Apache-2.0
"""A job that is asked to stop: every rank ends before the same step, and a resumed job equals an uninterrupted one."""

from __future__ import annotations

import logging.handlers
import multiprocessing
import os
import queue
import random
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from on_ranks import one_rank
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import rankwise as rw
from rankwise.comm.session import current
from rankwise.errors import PeerMissing
from rankwise.health.event_log import StopRequested, post
from rankwise.health.preemption import STOPPED_EXIT_CODE, listen
from rankwise.log import logger
from rankwise.testing import RankResult, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankwise.world.facts import World

EPOCHS = 6
NUM_SAMPLES = 61
NUM_BATCHES = 16
TOLERANCE = 1e-12
Parameters = dict[str, torch.Tensor]


def _prepare(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, rw.DataLoader]:
    torch.manual_seed(seed)
    x, y = torch.randn(NUM_SAMPLES, 5, dtype=torch.float64), torch.randn(NUM_SAMPLES, 2, dtype=torch.float64)
    model = rw.replicate(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = rw.DataLoader(TensorDataset(x, y), global_batch_size=4, shuffle=True, seed=seed)
    return model, optimizer, loader


def _train(world: World, seed: int, folder: str | None, before_step: Callable[[int], None]) -> Parameters:
    """Train with a schedule that steps after each epoch, and accumulation over two batches of the loader."""
    model, optimizer, loader = _prepare(seed)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    if folder is not None:
        rw.Checkpointer(folder).restore(model=model, optimizer=optimizer, loader=loader, schedule=schedule)
    rng, step = random.Random(f"{seed} {world.rank}"), 0
    for _epoch in range(loader.epoch, EPOCHS):
        for number, (x, y) in enumerate(loader):
            step += 1
            before_step(step)
            if folder is not None and rng.random() < 0.3:
                time.sleep(rng.random() * 0.02)
            if seed % 2 and number % 2 == 0 and not _is_last(loader):
                with rw.no_sync(model):
                    nn.functional.mse_loss(model(x), y).backward()
                continue
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return {key: value.clone() for key, value in model.state_dict().items()}


def _is_last(loader: rw.DataLoader) -> bool:
    return bool(loader.state_dict()["position"] == NUM_SAMPLES)


def _undisturbed(world: World, seed: int) -> Parameters:
    return _train(world, seed, None, lambda _: None)


def _told_at_step(world: World, seed: int, folder: str, step_told: int | None) -> Parameters:
    """Train; one rank tells all through the store as it begins a step; the trail says which step each has begun."""
    store = current().store
    trail = Path(folder, f"trail-{world.rank}")

    def before_step(step: int) -> None:
        trail.write_text(str(step), encoding="utf-8")
        if step == step_told and world.rank == seed % world.world_size:
            if store is None:
                current().preemption.ask("the test")
            else:
                post(store, StopRequested("the test"))

    return _train(world, seed, f"{folder}/net", before_step)


def _stopped_at(results: list[RankResult], folder: Path) -> int:
    """Return the step that all ranks have stopped after."""
    for result in results:
        assert isinstance(result.error, SystemExit), result
        assert result.error.code == STOPPED_EXIT_CODE
    steps = {(folder / f"trail-{rank}").read_text(encoding="utf-8") for rank in range(len(results))}
    assert len(steps) == 1, steps
    return int(steps.pop())


def _num_checkpoints(folder: Path) -> int:
    return len(list((folder / "net").glob("checkpoint-*")))


def _difference(left: Parameters, right: Parameters) -> float:
    return max(((left[k] - right[k]).abs().max() / right[k].abs().max().clamp(min=1e-3)).item() for k in right)


@pytest.mark.parametrize(("world_sizes", "seed"), [((1, 1, 1), 3), ((2, 2, 2), 4), ((3, 3, 3), 5), ((4, 4, 4), 6)])
def test_stopped_at_any_moment_and_resumed_it_is_the_same_run_bit_for_bit(
    tmp_path: Path, world_sizes: tuple[int, ...], seed: int
) -> None:
    expected = run_ranks(_undisturbed, world_sizes[0], seed)[0].get()
    assert _stopped_and_resumed(tmp_path, world_sizes, seed, expected) == 0.0


@pytest.mark.parametrize(("world_sizes", "seed"), [((2, 3, 4), 7), ((4, 1, 2), 8)])
def test_stopped_at_any_moment_and_resumed_on_other_ranks_it_is_the_same_run(
    tmp_path: Path, world_sizes: tuple[int, ...], seed: int
) -> None:
    assert _stopped_and_resumed(tmp_path, world_sizes, seed, one_rank(_undisturbed, seed)) < TOLERANCE


def _stopped_and_resumed(folder: Path, world_sizes: tuple[int, ...], seed: int, expected: Parameters) -> float:
    """Stop the job on every number of ranks but the last; return how far its end is from what was expected."""
    rng = random.Random(seed)
    for number, world_size in enumerate(world_sizes[:-1], start=1):
        told = rng.randint(1, NUM_BATCHES + 5)
        results = run_ranks(_told_at_step, world_size, seed, str(folder), told)
        assert _stopped_at(results, folder) >= told
        assert _num_checkpoints(folder) == number
    results = run_ranks(_told_at_step, world_sizes[-1], seed, str(folder), None)
    return max(_difference(result.get(), expected) for result in results)


class _Squares(Dataset[torch.Tensor]):
    """Something that only worker processes can read."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)]) ** 2


def _signalled(world: World, folder: str) -> list[int]:
    """Take batches; in the third step rank 1 and its loader's workers get both signals, as from Slurm."""
    restore = listen(current().preemption, ["SIGUSR2", "SIGTERM"])
    taken: list[int] = []
    try:
        loader = rw.DataLoader(_Squares(), global_batch_size=2 * world.world_size, num_workers=1)
        rw.Checkpointer(folder).restore(loader=loader)
        for number, _ in enumerate(loader):
            taken.append(number)
            if number == 2 and world.rank == world.world_size - 1:
                for process in (*(child.pid for child in multiprocessing.active_children()), os.getpid()):
                    subprocess.run(["kill", "-USR2", str(process)], check=True)
                    # Not by os.kill: from its rank, SIGTERM does end a worker.
                    subprocess.run(["kill", "-TERM", str(process)], check=True)
    except SystemExit as stopped:
        return [*taken, stopped.code]
    finally:
        restore()
    return taken


@pytest.mark.parametrize("world_size", [1, 2])
def test_signals_to_one_rank_and_its_workers_stop_all_ranks_and_lose_no_batch(tmp_path: Path, world_size: int) -> None:
    results = [result.get() for result in run_ranks(_signalled, world_size, str(tmp_path))]
    assert all(result == results[0] for result in results)
    *taken, code = results[0]
    assert code == STOPPED_EXIT_CODE
    assert taken == list(range(3)) if world_size == 1 else 3 <= len(taken) < 1000


def _asks_by_itself(world: World, folder: str) -> int:
    checkpoints = rw.Checkpointer(folder)
    state = {"step": 0}
    checkpoints.restore(state=state)
    while state["step"] < 1000:
        checkpoints.stop_if_asked(state=state)
        state["step"] += 1
        if world.rank == 1 and state["step"] == 10:
            current().preemption.ask("the test")
        rw.barrier()
    return state["step"]


def test_a_loop_without_a_loader_calls_stop_if_asked(tmp_path: Path) -> None:
    results = run_ranks(_asks_by_itself, 2, str(tmp_path))
    assert [getattr(result.error, "code", None) for result in results] == [STOPPED_EXIT_CODE] * 2
    saved = {"step": 0}
    with rw.join():
        rw.Checkpointer(tmp_path).restore(state=saved)
    assert 10 <= saved["step"] < 1000


def _told_with_nothing_to_save(world: World) -> list[str]:
    said: queue.Queue[logging.LogRecord] = queue.Queue()
    logger.addHandler(logging.handlers.QueueHandler(said))
    rw.barrier()
    store = current().store
    if world.rank == 1 and store is not None:
        post(store, StopRequested("the test"))
    for _ in rw.DataLoader(torch.zeros(20), global_batch_size=4):
        rw.barrier()
    return [said.get(timeout=20).message] if world.rank == 0 else []


def test_with_nothing_to_save_the_job_continues_and_one_rank_says_what_to_do() -> None:
    (said,), others = (result.get() for result in run_ranks(_told_with_nothing_to_save, 2))
    assert "Pass Checkpointer.restore() or save() the rankwise.DataLoader" in said
    assert others == []


def _count_batches(loader: Iterable[object]) -> int:
    return sum(1 for _ in loader)


def _one_rank_never_counts(world: World, folder: str) -> tuple[int, ...]:
    store, detector = current().store, current().detector
    assert store is not None
    assert detector is not None
    loader = rw.DataLoader(torch.zeros(100_000), global_batch_size=2)
    rw.Checkpointer(folder).restore(loader=loader)
    if world.rank == 1:
        detector.preemption.read = lambda *_: None
        post(store, StopRequested("the test"))
        # In no collective: its wait would last as long as the one for its count, and either may end first.
        store.wait(["named"], 30)
        return ()
    with pytest.raises(PeerMissing) as missing:
        _count_batches(loader)
    store.set("named", "")
    return missing.value.ranks


def test_a_rank_that_does_not_answer_is_named(tmp_path: Path) -> None:
    results = run_ranks(_one_rank_never_counts, 2, str(tmp_path), join_timeout_seconds=1.0)
    assert [result.get() for result in results] == [(1,), ()]


def _beside_the_best(_: World, folder: str) -> str:
    """Train with one folder to resume from and one for the best; return the contents of the best when asked to stop."""
    model, optimizer, loader = _prepare(0)
    rw.Checkpointer(f"{folder}/last").restore(model=model, optimizer=optimizer, loader=loader)
    best = rw.Checkpointer(f"{folder}/best", keep=1)
    best.save(model=model, optimizer=optimizer, loader=loader)
    try:
        for number, _batch in enumerate(loader):
            if number == 2:
                current().preemption.ask("the test")
    except SystemExit:
        return ",".join(sorted(path.name for path in Path(folder).glob("*/checkpoint-*")))
    return "never stopped"


def _of_two_loaders(_: World, folder: str) -> int:
    """Train two models on two loaders, each with a folder of its own; return how many steps were taken."""
    steps = 0
    loaders = []
    for name in ("a", "b"):
        model, optimizer, loader = _prepare(0)
        rw.Checkpointer(f"{folder}/{name}").restore(model=model, optimizer=optimizer, loader=loader)
        loaders.append(loader)
    current().preemption.ask("the test")
    for loader in loaders:
        for _batch in loader:
            steps += 1
    return steps


def test_a_stop_leaves_the_folder_of_the_best_as_it_is(tmp_path: Path) -> None:
    (result,) = run_ranks(_beside_the_best, 1, str(tmp_path))
    assert result.get() == "checkpoint-000001,checkpoint-000001"
    saved = [path.parent for path in tmp_path.glob("*/*")]
    assert sorted(folder.name for folder in saved) == ["best", "last"]


def test_of_two_loops_in_turn_none_is_saved_without_the_other(tmp_path: Path) -> None:
    (result,) = run_ranks(_of_two_loaders, 1, str(tmp_path))
    assert result.get() == 2 * NUM_BATCHES
    assert not list(tmp_path.glob("*/*"))
