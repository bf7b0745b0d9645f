# SPDX-License-Identifier: Apache-2.0
"""How tensors travel: the same bits on every rank, whatever the sizes and in whatever order."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.comm.backends import shared_channel
from rankwise.comm.backends.shared_memory import SLOT_BYTES
from rankwise.comm.session import current
from rankwise.errors import CollectiveMismatch, ConfigurationError
from rankwise.testing import run_ranks as run_ranks_auto

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from on_ranks import RunRanks

    from rankwise.world.facts import World

pytestmark = pytest.mark.every_exchange


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


OTHERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64)


@cache
def _drawn(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    numel = max(_sizes(dtype.itemsize))
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(numel, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 20, (numel,), generator=generator, dtype=torch.uint8).to(
        dtype
    )


def _of_rank(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return _drawn(rank, dtype)[:numel].clone()


def _sizes(itemsize: int) -> list[int]:
    slot = SLOT_BYTES // itemsize
    return [0, 1, 7, 4099, slot - 1, slot, slot + 1, 2 * slot + 5]


def _looks_at_a_waiting_rank(world: World) -> tuple[str, bool] | None:
    detector = current().detector
    assert detector is not None
    rw.barrier()
    rw.barrier()
    answer: dict[str, Any] = {}
    while world.rank == 0 and not answer.get("waiting"):
        answer = detector.poll_status()[1]
    rw.barrier()
    return (answer["what"], answer["is_over"]) if answer else None


def test_what_a_rank_waits_in_is_not_over(run_ranks: RunRanks) -> None:
    assert run_ranks(_looks_at_a_waiting_rank, 2)[0].get() == ("barrier()", False)


def _everything_travels(world: World) -> None:
    ranks = range(world.world_size)
    for dtype in (*FLOATS, *OTHERS):
        for numel in _sizes(dtype.itemsize):
            own = _of_rank(world.rank, numel, dtype)
            gathered = rw.all_gather(own)
            for rank in ranks:
                assert torch.equal(gathered[rank], _of_rank(rank, numel, dtype))
            assert torch.equal(rw.broadcast(own, source=world.world_size - 1), gathered[-1])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_tensors_of_every_dtype_arrive_whole(world_size: int) -> None:
    for result in run_ranks_auto(_everything_travels, world_size, exchange="shared_memory"):
        result.get()


def _reductions(world: World) -> None:
    ranks = range(world.world_size)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8):
        for numel in _sizes(dtype.itemsize):
            parts = [_of_rank(rank, numel, dtype) for rank in ranks]
            total, product = parts[0].clone(), parts[0].clone()
            smallest, largest = parts[0], parts[0]
            for part in parts[1:]:
                total, product = total + part, product * part
                smallest, largest = torch.minimum(smallest, part), torch.maximum(largest, part)
            expected = {"sum": total, "product": product, "min": smallest, "max": largest}
            for op, value in expected.items():
                # Equal to the last bit: added up in rank order.
                assert torch.equal(rw.all_reduce(parts[world.rank], op), value), (dtype, numel, op)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shared_memory_reduces_in_rank_order(world_size: int) -> None:
    for result in run_ranks_auto(_reductions, world_size, exchange="shared_memory"):
        result.get()


class Net(nn.Module):
    """Enough layers for several buckets; one is not used by every rank."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(300, 300) for _ in range(9)])
        self.odd = nn.Linear(300, 300)
        self.to(dtype)

    def forward(self, x: torch.Tensor, *, with_odd: bool) -> torch.Tensor:
        x = self.layers(x)
        return self.odd(x) if with_odd else x


def _bits(tensor: torch.Tensor | None) -> str | None:
    """Return what differs where a bit does: megabytes would take longer to come back than to compute."""
    return None if tensor is None else hashlib.sha256(tensor.numpy()).hexdigest()


def _gradients(world: World) -> list[str | None]:
    # Every dtype on an odd number of ranks; on the others one of each width.
    dtypes = FLOATS if world.world_size == 3 else FLOATS[::2]
    return [gradient for dtype in dtypes for gradient in _gradients_of(world, dtype)]


def _gradients_of(world: World, dtype: torch.dtype) -> list[str | None]:
    torch.manual_seed(0)
    model = rw.replicate(Net(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(world.rank)
    for step in range(4):
        for micro in range(2):
            x = torch.randn(2 + (world.rank + step) % 3, 300).to(dtype)
            loss = model(x, with_odd=world.rank == 1 and step > 0).square().mean()
            if micro == 0:
                with rw.no_sync(model):
                    loss.backward()
            else:
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if step < 3:
            optimizer.zero_grad()
    return [_bits(None if p.grad is None else p.grad.float()) for p in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_are_the_same_bits_on_every_rank_and_in_every_run(world_size: int, run_ranks: RunRanks) -> None:
    first, second = (run_ranks(_gradients, world_size) for _ in range(2))
    reference = first[0].get()
    assert all(gradient is not None for gradient in reference)
    for result in (*first, *second):
        assert result.get() == reference


def _two_models_in_either_order(world: World) -> list[str | None]:
    torch.manual_seed(0)
    first, second = (rw.replicate(nn.Linear(400, 400).double()) for _ in range(2))
    x = torch.full((2, 400), world.rank + 1.0, dtype=torch.float64)
    for step in range(3):
        for model in (first, second):
            model.zero_grad()
        # Backward goes through what was computed last first: another order on every rank.
        if (world.rank + step) % 2:
            a = first(x).square().mean()
            b = second(x).square().mean()
        else:
            b = second(x).square().mean()
            a = first(x).square().mean()
        (a + b).backward()
    return [_bits(p.grad) for model in (first, second) for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("world_size", [2, 3])
def test_models_may_come_in_another_order_on_every_rank(world_size: int, run_ranks: RunRanks) -> None:
    reference, *others = (result.get() for result in run_ranks(_two_models_in_either_order, world_size))
    assert len(reference) == 4
    assert others == [reference] * (world_size - 1)


class Branching(nn.Module):
    """Synchronised BatchNorm in front of layers that fill an arena, and a layer that each rank has to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 1024), nn.BatchNorm1d(1024)
        self.body = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
        self.own = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(2)])

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.own[rank](self.body(self.norm(self.first(x))))


def _wait_elsewhere(world: World) -> list[str | None]:
    torch.manual_seed(0)
    model = rw.replicate(Branching(), sync_batchnorm=True)
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(4, 8), world.rank).mean().backward()
    return [_bits(p.grad) for p in model.parameters() if p.grad is not None]


def _large_models_in_either_order(world: World) -> list[str | None]:
    torch.manual_seed(0)
    first, second = (rw.replicate(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(5)])) for _ in range(2))
    for _ in range(2):
        for model in (first, second):
            model.zero_grad()
        x = torch.randn(4, 1024)
        (first(second(x)) if world.rank else second(first(x))).mean().backward()
    return [_bits(p.grad) for model in (first, second) for p in model.parameters() if p.grad is not None]


def _in_a_small_arena(world: World, train: Callable[[World], list[str | None]]) -> list[str | None]:
    # Two buckets fill it, so that the third is laid over the first.
    shared_channel.ARENA_BYTES = 1
    return train(world)


@pytest.mark.parametrize("train", [_wait_elsewhere, _large_models_in_either_order])
def test_a_full_arena_does_not_hold_up_a_backward_that_others_wait_for(train: Any, run_ranks: RunRanks) -> None:
    first, second = (result.get() for result in run_ranks(_in_a_small_arena, 2, train, join_timeout_seconds=15.0))
    assert len(first) > 9
    assert first == second


def _descriptors() -> Iterator[str]:
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            yield str(link.readlink())


def _models_come_and_go(_: World) -> list[tuple[int, int]]:
    held = []
    for _number in range(4):
        model = rw.replicate(nn.Linear(600, 600))
        model(torch.randn(2, 600)).mean().backward()
        del model
        gc.collect()
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:rankwise")
        held.append((maps, sum("memfd:rankwise" in target for target in _descriptors())))
    return held


def test_memory_and_descriptors_of_deleted_models_are_freed() -> None:
    for result in run_ranks_auto(_models_come_and_go, 2, exchange="shared_memory"):
        held = result.get()
        assert held[1:] == [held[0]] * 3


def _ours_against_theirs(world: World) -> str:
    model = rw.replicate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with pytest.raises(CollectiveMismatch) as caught:
        model(torch.randn(3, 4)) if world.rank == 0 else rw.barrier()
    assert rw.all_reduce(1) == world.world_size, "the ranks can go on"
    return str(caught.value)


def test_rankwises_own_messages_are_distinguished_from_the_users() -> None:
    for result in run_ranks_auto(_ours_against_theirs, 2, exchange="shared_memory"):
        assert "rank 0: buffers of rank 0" in result.get()
        assert "rank 1: barrier()" in result.get()


def _refused_on_one_rank(world: World) -> int:
    model = rw.replicate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    if world.rank == 0:
        for value, op in ((torch.tensor(3), "mean"), (torch.ones(2, dtype=torch.int16), "sum")):
            with pytest.raises(ConfigurationError):
                rw.all_reduce(value, op)
    model(torch.randn(3, 4)).mean().backward()
    return rw.all_reduce(1)


def test_a_call_that_is_refused_sends_nothing(run_ranks: RunRanks) -> None:
    assert [result.get() for result in run_ranks(_refused_on_one_rank, 2)] == [2, 2]


def _odd_views(world: World) -> None:
    x = torch.tensor([1 + 2j, 3 - 1j]) * (world.rank + 1)
    last = torch.tensor([1 + 2j, 3 - 1j]) * world.world_size
    assert torch.equal(rw.broadcast(x.conj(), world.world_size - 1), last.conj().resolve_conj())
    assert torch.equal(rw.all_gather(x.conj())[-1], last.conj().resolve_conj())
    assert torch.equal(rw.broadcast(x[:1].conj().imag, world.world_size - 1), last[:1].conj().imag.clone())
    small = torch.ones(3).to(torch.float8_e4m3fn)
    assert rw.all_gather(small)[0].dtype == torch.float8_e4m3fn


def test_lazy_views_and_rare_dtypes_travel(run_ranks: RunRanks) -> None:
    for result in run_ranks(_odd_views, 2):
        result.get()


def _many_sums(world: World, number: int) -> list[int]:
    totals = [rw.all_reduce(torch.full((50_000,), number)) for _ in range(100)]
    assert world.world_size == 2
    return [int(total.unique().item()) for total in totals]


def test_two_jobs_of_one_host_never_meet() -> None:
    results: dict[int, Any] = {}

    def job(number: int) -> None:
        results[number] = [result.get() for result in run_ranks_auto(_many_sums, 2, number)]

    threads = [threading.Thread(target=job, args=[number]) for number in (1, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [[2] * 100] * 2, 10: [[20] * 100] * 2}


def _many_ranks(world: World) -> int:
    total = 0
    for number in range(50):
        total += rw.all_reduce(number)
    return total // world.world_size


def test_more_ranks_than_cores(run_ranks: RunRanks) -> None:
    assert [result.get() for result in run_ranks(_many_ranks, 8)] == [sum(range(50))] * 8
