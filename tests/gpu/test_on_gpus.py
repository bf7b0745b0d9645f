# SPDX-License-Identifier: Apache-2.0
"""Every way of spreading a model, with a GPU per rank, against one CPU: as many ranks as there are GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from replicas import TOLERANCE, largest_difference
from spread_training import WAYS, Net, train
from trained_otherwise import train_in_words, train_seldom

import rankwise as rw
from rankwise.insight.run_records import read_run
from rankwise.insight.step_table import table_of
from rankwise.replicate.random_numbers import counter
from rankwise.replicate.random_numbers.counter import SAMPLERS, kept
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from spread_training import Found

    from rankwise.world.facts import World

NUM_GPUS = torch.accelerator.device_count()
KIND = getattr(torch.accelerator.current_accelerator(), "type", "cuda")
ALONE = [(way, {}) for way in ("replicate", "shard", "pipeline", "placed")]
FITTING = [*ALONE, *(way for way in WAYS if torch.Size(way[1].values()).numel() <= NUM_GPUS)]


@pytest.fixture(scope="module")
def one_cpu(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(train, 1, "replicate", {}, str(tmp_path_factory.mktemp("none")))[0].get()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "sizes"), FITTING, ids=[f"{way} {sizes}" for way, sizes in FITTING])
def test_a_model_distributed_over_gpus_trains_as_on_one_cpu(
    tmp_path_factory: pytest.TempPathFactory, one_cpu: Found, strategy: str, sizes: dict[str, int]
) -> None:
    world_size = torch.Size(sizes.values()).numel()
    folder = str(tmp_path_factory.mktemp("offloaded"))
    results = run_ranks(train, world_size, strategy, sizes, folder, device=None, timeout_seconds=240.0)
    for kind, expected in enumerate(one_cpu):
        for result in results:
            found = result.get()[kind]
            assert largest_difference(found, {name: expected[name] for name in found}) < TOLERANCE


def _shard_in_cpu_memory(world: World, offloads: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = rw.shard(Net().double().to(world.device), cpu_offload=offloads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(world.device)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.full_tensor().detach().cpu() for name, parameter in model.named_parameters()}


@pytest.mark.timeout(300)
def test_a_model_sharded_in_cpu_memory_trains_the_same() -> None:
    kept, offloaded = (
        run_ranks(_shard_in_cpu_memory, NUM_GPUS, offloads, device=None, timeout_seconds=240.0)[0].get()
        for offloads in (False, True)
    )
    assert largest_difference(offloaded, kept) < TOLERANCE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("words", ["horovod", "megengine"])
def test_scripts_in_other_libraries_words_train_as_on_one_cpu(words: str) -> None:
    expected = run_ranks(train_in_words, 1, words, NUM_GPUS)[0].get()
    for result in run_ranks(train_in_words, NUM_GPUS, words, NUM_GPUS, device=None, timeout_seconds=240.0):
        assert largest_difference(result.get(), expected) < TOLERANCE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["parameter server", "worker_groups"])
def test_other_transports_train_as_on_one_cpu(way: str) -> None:
    expected = run_ranks(train_seldom, 1, way, NUM_GPUS)[0].get()
    for result in run_ranks(train_seldom, NUM_GPUS, way, NUM_GPUS, device=None, timeout_seconds=240.0):
        assert largest_difference(result.get(), expected) < TOLERANCE


def _queue_and_read_at_the_end(world: World, folder: str) -> None:
    rw.leave()
    with rw.join(init_method=f"file://{folder}/store", rank=world.rank, world_size=world.world_size, report=folder):
        model = rw.replicate(torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).to(world.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        x = torch.randn(4096, 2048, device=world.device)
        for _ in range(50):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loss.item()


@pytest.mark.timeout(300)
def test_steps_take_what_they_take_on_the_gpu_and_not_what_queueing_takes(tmp_path: Path) -> None:
    for result in run_ranks(_queue_and_read_at_the_end, NUM_GPUS, str(tmp_path), device=None, timeout_seconds=240.0):
        result.get()
    run = read_run(tmp_path)
    assert {record.facts["times"] for record in run.ranks} == {"device"}
    steady = table_of(run.ranks).steady()
    means = steady.mean_parts()
    # Backward computes twice as much as forward. The host, which only queues it, would see something else.
    assert (means["backward"] > 1.2 * means["forward"]).all()
    assert (means["forward"] + means["backward"] > means["script"]).all()


@pytest.mark.parametrize("operation", ["bernoulli_.float", "uniform_", "random_.from"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_gpu_draws_the_bits_of_a_cpu(operation: str, dtype: torch.dtype) -> None:
    args = {"bernoulli_.float": (0.9,), "uniform_": (-1.0, 3.0), "random_.from": (-5, 12)}[operation]
    for at in (range(1), range(7, 50_000), range(2**34 + 3, 2**34 + 3_000_003)):
        drawn, expected = (
            SAMPLERS[operation]((2**63 + 5, 3), at, dtype, args, torch.device(kind)) for kind in (KIND, "cpu")
        )
        assert torch.equal(drawn.cpu(), expected)


@pytest.mark.parametrize("probability", [1e-6, 0.1, 0.5, 1 / 3, 1 - 1e-6])
def test_a_gpu_draws_masks_without_waiting_for_it(probability: float) -> None:
    at = range(3, 3_000_003)
    device = torch.device(KIND, 0)
    SAMPLERS["bernoulli_.float"]((9, 9), at, torch.float32, (probability,), device)  # compiles
    if KIND == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = SAMPLERS["bernoulli_.float"]((1, 2), at, torch.float32, (probability,), device)
        SAMPLERS["normal_"]((1, 2), at, torch.float32, (), device)
    finally:
        if KIND == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(drawn.cpu(), torch.from_numpy(kept((1, 2), 3, len(at), probability)))


def test_a_gpu_runs_the_triton_kernels() -> None:
    pytest.importorskip("triton")
    SAMPLERS["uniform_"]((0, 0), range(1), torch.float32, (), torch.device(KIND, 0))
    assert counter._Triton.kernels is not None
