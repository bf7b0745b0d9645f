# SPDX-License-Identifier: Apache-2.0
"""The stand-in device's own strict backend: it does to a careless caller what NCCL does."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from on_standin import build_standin, on_standin, results_on_standin

import rankwise as rw
from rankwise.testing import RankDied

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.world.facts import World

pytestmark = pytest.mark.timeout(240)  # the first of these tests may have to compile the device and its backend


@pytest.fixture(scope="module", autouse=True)
def _standin_is_built() -> None:
    build_standin(strict=True)


def _ones(world: World, *shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=world.device)


def _wait_for_peer(world: World, name: str) -> None:
    """Return when every rank is here. The store's calls do not wait for the device."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}{world.rank}", "here")
    store.wait([f"{name}{rank}" for rank in range(world.world_size)])


def _ordered(world: World) -> list[Any]:
    tensor, whole = _ones(world, 3), torch.ones(2, device=world.device, dtype=torch.int64)
    works = [dist.all_reduce(one, async_op=True) for one in (tensor, whole)]
    before = tensor.isnan().all().item(), whole.tolist()
    for work in works:
        work.wait()
    side = torch.Stream(world.device)
    again = _ones(world, 1)
    with side:
        dist.all_reduce(again, async_op=True).wait()
    other_stream = again.isnan().item()
    torch.accelerator.current_stream().wait_stream(side)
    return [world.backend, before, tensor.tolist(), whole.tolist(), other_stream, again.item()]


def test_results_are_there_once_the_stream_was_ordered_after_them() -> None:
    lowest = [torch.iinfo(torch.int64).min] * 2
    assert on_standin(_ordered, 2, backend="strict") == [["strict", (True, lowest), [2.0] * 3, [2, 2], True, 2.0]] * 2


def _timed_out(world: World) -> str:
    if world.rank == 1:
        _wait_for_peer(world, "over")
        return ""
    work = dist.all_reduce(_ones(world, 1), async_op=True)
    assert work.wait()
    assert not work.is_completed()
    with pytest.raises(RuntimeError, match="timed out in blocking wait"):
        work.wait(timedelta(milliseconds=50))
    with pytest.raises(RuntimeError) as later:
        dist.all_reduce(_ones(world, 1))
    _wait_for_peer(world, "over")
    return str(later.value)


def test_a_wait_whose_time_is_up_is_terminal() -> None:
    assert "the communicator was aborted" in on_standin(_timed_out, 2, backend="strict")[0]


def _aborted(world: World) -> tuple[bool, bool]:
    from threading import Timer

    if world.rank == 1:
        _wait_for_peer(world, "over")
        return True, True
    tensor = _ones(world, 1)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    Timer(0.2, dist.group.WORLD.abort).start()
    found = (tensor * 2).isnan().item(), work.is_completed()  # Blocks until then.
    _wait_for_peer(world, "over")
    return found


def test_abort_releases_a_blocked_stream() -> None:
    assert on_standin(_aborted, 2, backend="strict") == [(True, True)] * 2


def _killed_peer(world: World) -> str:
    dist.all_reduce(tensor := _ones(world, 1))
    assert tensor.item() == 2
    _wait_for_peer(world, "first")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(_ones(world, 1), async_op=True)
    with pytest.raises(RuntimeError) as caught:
        work.wait(timedelta(seconds=1))
    return str(caught.value)


def test_a_dead_peer_is_not_noticed() -> None:
    said = results_on_standin(_killed_peer, 2, backend="strict")[0].value
    # Gloo below notices at once, and nothing follows from it; rankwise aborts the communicator when it knows.
    assert "timed out" in said or "aborted" in said


def _errors_into(folder: str, world: World) -> None:
    """Send what this rank writes to stderr into a file: ranks do not write where this process does."""
    os.dup2(os.open(f"{folder}/{world.rank}", os.O_CREAT | os.O_WRONLY), 2)


def _overdue(world: World, folder: str) -> None:
    _errors_into(folder, world)
    group = dist.new_group(timeout=timedelta(seconds=1))
    if world.rank == 0:
        dist.all_reduce(_ones(world, 1), group=group)
    _wait_for_peer(world, f"never{world.rank}")


def test_the_watchdog_ends_the_process(tmp_path: Path) -> None:
    first = results_on_standin(_overdue, 2, str(tmp_path), backend="strict", timeout_seconds=10.0)[0]
    assert isinstance(first.error, RankDied)
    assert "is not complete 1000 ms after it was queued" in (tmp_path / "0").read_text()


def _in_another_order(world: World, folder: str) -> None:
    _errors_into(folder, world)
    groups = [dist.new_group(), dist.new_group()]
    if world.rank == 1:
        groups.reverse()
    tensors = [_ones(world, 1), _ones(world, 1)]  # Made first, and not waited for: the device would block.
    for tensor, group in zip(tensors, groups, strict=True):
        dist.all_reduce(tensor, group=group, async_op=True)
    torch.accelerator.synchronize()


def test_another_order_of_communicators_ends_the_process(tmp_path: Path) -> None:
    results_on_standin(_in_another_order, 2, str(tmp_path), backend="strict", timeout_seconds=10.0)
    assert "in different orders" in "".join(path.read_text() for path in tmp_path.iterdir())


def _refused(world: World) -> list[str]:
    dist.all_reduce(_ones(world, 1))
    texts = []
    for tensor in (_ones(world, 4, 4)[:, 1], torch.ones(1, device="standin:3"), _ones(world, 1).short()):
        with pytest.raises((ValueError, TypeError)) as caught:
            dist.all_reduce(tensor)
        texts.append(str(caught.value))
    return texts


def test_tensors_that_nccl_cannot_take_are_refused() -> None:
    for contiguous, device, dtype in on_standin(_refused, 2, backend="strict"):
        assert "Tensors must be contiguous" in contiguous
        assert "a tensor is on standin:3" in device
        assert "is not supported for NCCL" in dtype


def _host_syncs(world: World) -> list[int]:
    tensor, host = _ones(world, 4), torch.ones(4)

    def syncs(call: Any) -> int:
        before = torch.standin.host_syncs()
        call()
        return torch.standin.host_syncs() - before

    calls = [
        lambda: tensor.mul_(2).sum(),
        lambda: dist.all_reduce(tensor),
        lambda: host.pin_memory().to(tensor.device, non_blocking=True),
        lambda: tensor.sum().item(),
        lambda: host.to(tensor.device),
        tensor.cpu,
        tensor.nonzero,
        torch.accelerator.synchronize,
        lambda: dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=10)),
    ]
    counts = [syncs(call) for call in calls]
    torch.standin.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="the CPU waits for the stand-in device: the value of one element"):
        tensor[0].item()
    torch.standin.set_sync_debug_mode("default")
    return counts


def test_what_waits_for_the_device_is_counted() -> None:
    assert on_standin(_host_syncs, 2, backend="strict") == [[0, 0, 0, 1, 1, 1, 1, 1, 1]] * 2


def _point_to_point(world: World) -> list[float]:
    peer = 1 - world.rank
    own, taken = _ones(world, 2) * world.rank, _ones(world, 2)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, taken, peer)]):
        work.wait()
    if world.rank == 0:
        dist.send(own + 5, 1)
    else:
        again = torch.empty_like(own)
        dist.recv(again, 0)
        taken += again
    return [*taken.tolist(), rw.all_reduce(own).sum().item()]


def test_ranks_send_to_one_another() -> None:
    assert on_standin(_point_to_point, 2, backend="strict") == [[1.0, 1.0, 2.0], [5.0, 5.0, 2.0]]
