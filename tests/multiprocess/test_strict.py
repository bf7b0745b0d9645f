# SPDX-License-Identifier: Apache-2.0
"""rankwise on a backend that is asynchronous and unforgiving as NCCL is: every strategy, failures, no waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
import torch
from on_standin import FOLDER, NUM_DEVICES, build_standin, on_standin, results_on_standin
from replicas import TOLERANCE, largest_difference
from spread_training import PLAN, WAYS, Net
from spread_training import train as train_spread
from torch import nn

import rankwise as rw
from rankwise.errors import CollectiveMismatch, PeerFailed, PeerMissing
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from spread_training import Found

    from rankwise.world.facts import World

pytestmark = pytest.mark.timeout(240)  # the first of these tests may have to compile the device and its backend

LIMIT_SECONDS = 5.0


@pytest.fixture(scope="module", autouse=True)
def _standin_is_built() -> None:
    build_standin(strict=True)


def _strict(fn: Callable[..., Any], world_size: int, *args: object) -> list[Any]:
    return on_standin(fn, world_size, *args, backend="strict")


# -- every strategy; replicate, and other ways to train, are in test_accelerator.py ------------------------


@pytest.fixture(scope="module")
def one_cpu(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(train_spread, 1, "replicate", {}, str(tmp_path_factory.mktemp("none")))[0].get()


FITTING = [way for way in WAYS if torch.Size(way[1].values()).numel() <= NUM_DEVICES]


@pytest.mark.parametrize(("strategy", "sizes"), FITTING, ids=[f"{way} {sizes}" for way, sizes in FITTING])
def test_every_strategy_trains_as_one_cpu(tmp_path: Path, one_cpu: Found, strategy: str, sizes: dict[str, int]) -> None:
    for found in _strict(train_spread, torch.Size(sizes.values()).numel(), strategy, sizes, str(tmp_path)):
        for kind, expected in enumerate(one_cpu):
            assert largest_difference(found[kind], {name: expected[name] for name in found[kind]}) < TOLERANCE


# -- what goes wrong ------------------------------------------------------------------------------------


def _small(world: World, way: str = "replicate") -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(world.device)
    model = rw.shard(model) if way == "shard" else rw.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.ones(4, 8, device=world.device)


def _with_a_late_rank(world: World, late_seconds: float) -> list[float]:
    model, optimizer, x = _small(world)
    for step in range(4):
        if step == 2 and world.rank == 1:
            Event().wait(late_seconds)  # A slow batch.
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model[0].bias.tolist()


def test_training_continues_when_a_rank_is_late() -> None:
    undisturbed, disturbed = (_strict(_with_a_late_rank, 2, seconds) for seconds in (0.0, 0.6))
    assert undisturbed == disturbed


def _until_a_rank_dies(world: World, folder: str, reads: str, way: str = "replicate") -> None:
    model, optimizer, x = _small(world, way)
    for step in range(100):
        if step == 3 and world.rank == world.world_size - 1:
            Path(folder, "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if reads == "loss":
            loss.item()
        if reads == "synchronize":
            torch.accelerator.synchronize()


def _until_a_rank_dies_in_torch(world: World, _folder: str, reads: str, _way: str) -> None:
    """A collective of torch's own: rankwise waits for nothing, and the device is blocked."""
    tensor = torch.ones(2, device=world.device)
    torch.distributed.all_reduce(tensor)
    torch.accelerator.synchronize()
    rw.barrier()
    if world.rank == world.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.all_reduce(tensor)
    if reads == "loss":
        tensor.sum().item()
    if reads == "synchronize":
        torch.accelerator.synchronize()
    rw.barrier()


def _says(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("way", "world_size", "reads"),
    [
        ("replicate", 2, "nothing"),
        ("replicate", 3, "loss"),
        ("replicate", 2, "synchronize"),
        ("shard", 2, "nothing"),
        ("shard", 2, "loss"),
        ("torch", 2, "nothing"),
        ("torch", 2, "loss"),
        ("torch", 2, "synchronize"),
    ],
)
def test_a_killed_rank_is_named_while_others_are_blocked_on_the_device(
    tmp_path: Path, way: str, world_size: int, reads: str
) -> None:
    call = _until_a_rank_dies_in_torch if way == "torch" else _until_a_rank_dies
    results = results_on_standin(call, world_size, str(tmp_path), reads, way, backend="strict", timeout_seconds=20.0)
    for result in results[:-1]:
        assert isinstance(result.error, PeerFailed | PeerMissing), _says(result.error)
        assert f"rank {world_size - 1}" in str(result.error).lower()


def _timed_survivor(world: World, folder: str) -> float:
    try:
        _until_a_rank_dies(world, folder, "loss")
    except (PeerFailed, PeerMissing):
        return time.monotonic() - float(Path(folder, "killed").read_text())
    raise AssertionError


def test_a_killed_rank_is_named_within_seconds(tmp_path: Path) -> None:
    result = results_on_standin(_timed_survivor, 2, str(tmp_path), backend="strict", timeout_seconds=40.0)[0]
    assert result.error is None, _says(result.error)
    assert result.value < LIMIT_SECONDS


def _without_a_rank(world: World) -> None:
    model, _, x = _small(world)
    store = torch.distributed.distributed_c10d._get_default_store()
    if world.rank == 1:
        store.wait(["over"])
        return
    try:
        loss = model(x).square().mean()
        loss.backward()
        loss.item()
        model[0].bias.grad.sum().item()
    finally:
        store.set("over", "")


DIES_BEFORE_IT_OPENS = """
import os, signal, sys, torch, rankwise as rw
rank = int(sys.argv[1])
if rank == 1:
    torch.distributed.init_process_group = lambda **_: os.kill(os.getpid(), signal.SIGKILL)
rw.join("strict", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
"""


def test_a_rank_that_is_killed_while_the_group_opens_is_named(tmp_path: Path) -> None:
    # There is no launcher that would report it.
    words = [sys.executable, "-c", DIES_BEFORE_IT_OPENS]
    env = os.environ | {"PYTHONPATH": FOLDER, "STANDIN_BACKEND": "strict"}
    killed = subprocess.Popen([*words, "1", str(tmp_path / "store")], env=env)
    try:
        other = subprocess.run(
            [*words, "0", str(tmp_path / "store")], env=env, capture_output=True, text=True, check=False, timeout=80
        )
    finally:
        killed.kill()
        killed.wait()
    assert other.returncode == 1
    assert "rank 1 exited without reporting an error" in other.stderr


def test_a_rank_that_never_arrives_is_named_at_the_timeout() -> None:
    results = results_on_standin(_without_a_rank, 2, backend="strict", join_timeout_seconds=3.0, timeout_seconds=12.0)
    assert isinstance(results[0].error, PeerMissing), _says(results[0].error)
    assert "rank 1" in str(results[0].error).lower()


def _that_raises(world: World) -> None:
    model, optimizer, x = _small(world)
    for step in range(100):
        if step == 3 and world.rank == 1:
            raise ZeroDivisionError
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


def test_an_error_on_one_rank_is_raised_on_the_other() -> None:
    results = results_on_standin(_that_raises, 2, backend="strict", timeout_seconds=40.0)
    assert isinstance(results[0].error, PeerFailed), _says(results[0].error)
    assert "ZeroDivisionError" in str(results[0].error)


def _models_in_two_orders(world: World) -> list[float]:
    """Two models, and ranks that differ in which comes first."""
    torch.manual_seed(0)
    models = [rw.replicate(nn.Linear(4, 4).to(world.device)) for _ in range(2)]
    x = torch.ones(2, 4, device=world.device) * (world.rank + 1)
    for _ in range(3):
        order = models if world.rank == 0 else models[::-1]
        losses = [model(x).square().mean() for model in models]
        for model in order:
            losses[models.index(model)].backward()
    return [model.weight.grad.sum().item() for model in models]


def test_models_whose_backward_has_another_order_on_another_rank_are_named() -> None:
    for result in results_on_standin(
        _models_in_two_orders, 2, backend="strict", join_timeout_seconds=5.0, timeout_seconds=30.0
    ):
        # On Gloo alone it is this error, too. Never a hang, or a process that the backend ends.
        assert isinstance(result.error, CollectiveMismatch), _says(result.error)


# -- no host synchronization in a step --------------------------------------------------------------------


def _syncs_per_step(  # noqa: C901 - one training, in each way
    world: World, way: str, sizes: dict[str, int], clips: bool, micro: int
) -> list[int]:
    """Return how often the CPU waits for the device in each of the steps after the first ones."""
    if sizes:
        rw.mesh(**sizes)
    torch.manual_seed(0)
    model = Net().to(world.device)
    x, y = torch.randn(4, 5).to(world.device), torch.randn(4, 3).to(world.device)
    step = None
    if sizes.get("tp", 1) > 1:
        rw.tensor_parallel(model, PLAN)
    if way == "shard":
        rw.shard(model)
    elif way == "pipeline":
        step = rw.pipeline(model, nn.functional.mse_loss, example=x[:2], micro_batches=2)
    else:
        rw.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    counts = []
    for number in range(8):
        before = torch.standin.host_syncs()
        if number == 5 and os.environ.get("STANDIN_SHOW_SYNCS"):
            torch.standin.set_sync_debug_mode("error")  # Shows the line.
        for index in range(micro):
            if step is not None:
                step(x, y)
            elif index < micro - 1:
                with rw.no_sync(model):
                    nn.functional.mse_loss(model(x), y).backward()
            else:
                nn.functional.mse_loss(model(x), y).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        counts.append(torch.standin.host_syncs() - before)
    return counts[4:]


STEPS = {
    "one rank": (1, "replicate", {}, False, 1),
    "replicate": (2, "replicate", {}, False, 1),
    "accumulation": (2, "replicate", {}, False, 3),
    "clipping": (2, "replicate", {}, True, 1),
    "shard": (2, "shard", {"dp_shard": 2}, False, 1),
    "shard, clipping": (2, "shard", {"dp_shard": 2}, True, 1),
    "shard, accumulation": (2, "shard", {"dp_shard": 2}, False, 2),
    "pipeline": (2, "pipeline", {"pp": 2}, False, 1),
    "tensor parallel": (2, "replicate", {"tp": 2}, False, 1),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_cpu_does_not_wait_for_the_device_in_a_step(name: str) -> None:
    world_size, *how = STEPS[name]
    assert _strict(_syncs_per_step, world_size, *how) == [[0] * 4] * world_size
