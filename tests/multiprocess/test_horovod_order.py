# SPDX-License-Identifier: Apache-2.0
"""Horovod's operations are matched by name, not by order; a mismatch is an error, and the world remains usable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import rankwise
import rankwise.compat.horovod as hvd
from rankwise import testing
from rankwise.compat.horovod import queue
from rankwise.errors import CollectiveMismatch, PeerMissing

if TYPE_CHECKING:
    from collections.abc import Callable

    from on_ranks import RunRanks

    from rankwise.world.facts import World


def _in_any_order(world: World) -> dict[str, Any]:
    hvd.init()
    rank, size = world.rank, world.world_size
    names = [f"layer{number}" for number in range(5)]
    # Each rank begins somewhere else, and takes the results in yet another order.
    handles = {}
    for number in range(5):
        name = names[(number + 2 * rank) % 5]
        handles[name] = hvd.allreduce_async(torch.full((3,), float(rank + len(handles))), name=name, op=hvd.Sum)
    handles["rows"] = hvd.allgather_async(torch.full((rank, 1), rank), name="rows")
    got = {name: hvd.synchronize(handles[name]).tolist() for name in sorted(handles, reverse=rank % 2 == 0)}
    # One rank asks for more than the others have asked for yet.
    early = hvd.broadcast_async(torch.tensor([float(rank)]), 0, name="early") if rank == size - 1 else None
    hvd.barrier()
    late = early if early is not None else hvd.broadcast_async(torch.tensor([float(rank)]), 0, name="early")
    got["early"] = hvd.synchronize(late).tolist()
    assert hvd.synchronize(late) is None, "the result has been taken"
    with pytest.raises(ValueError, match=r"call poll\(\) before synchronize\(\)"):
        hvd.poll(late)
    return got


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_order_does_not_count(run_ranks: RunRanks, world_size: int) -> None:
    ranks = range(world_size)
    for result in run_ranks(_in_any_order, world_size):
        got = result.get()
        for number in range(5):
            total = float(sum(rank + (number - 2 * rank) % 5 for rank in ranks))
            assert got[f"layer{number}"] == [total] * 3
        assert got["rows"] == [[rank] for rank in ranks for _ in range(rank)]
        assert got["early"] == [0.0]


def _polls(world: World) -> tuple[int, list[float]]:
    hvd.init()
    if world.rank == 1:
        # By now rank 0 has polled once, and its operation was not done.
        hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="first"))
    handle = hvd.allreduce_async(torch.tensor([float(world.rank)]), name="polled", op=hvd.Sum)
    num_polls = 1
    while not hvd.poll(handle):
        num_polls += 1
        if num_polls == 2:
            hvd.allreduce_async(torch.ones(1), name="first")
    return num_polls, hvd.synchronize(handle).tolist()


def test_poll_continues(run_ranks: RunRanks) -> None:
    (first, result), (second, _) = (one.get() for one in run_ranks(_polls, 2))
    assert result == [1.0]
    assert first > 1
    assert second >= 1


def _what_does_not_match(world: World) -> list[str]:
    hvd.init()
    rank = world.rank
    calls: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(torch.ones(3 if rank == 2 else 4), name="shape"),
        lambda: hvd.allreduce(torch.ones(3, dtype=torch.float64 if rank else torch.float32), name="dtype"),
        lambda: hvd.allreduce(torch.ones(3), op=hvd.Max if rank else hvd.Min, name="op"),
        lambda: hvd.allreduce(torch.ones(3), prescale_factor=1.0 + rank, name="scale"),
        lambda: hvd.broadcast(torch.ones(3), root_rank=rank, name="root"),
        lambda: hvd.allgather(torch.ones(1, 2 + rank), name="rest"),
        lambda: hvd.grouped_allreduce([torch.ones(1)] * (rank + 1), name="count"),
    ]
    errors = []
    for call in calls:
        beside = hvd.allreduce_async(torch.tensor([1.0]), name="beside", op=hvd.Sum)
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call()
        errors.append(str(caught.value))
        assert hvd.synchronize(beside).tolist() == [3.0], "the others are not concerned"
    return errors


def test_a_mismatch_is_an_error_on_all_ranks(run_ranks: RunRanks) -> None:
    first, *others = (result.get() for result in run_ranks(_what_does_not_match, 3))
    assert all(other == first for other in others)
    shape, dtype, op, scale, root, rest, count = first
    assert "'allreduce.shape' was called with different shapes." in shape
    assert "ranks 0-1: allreduce(float32[4], op=Average" in shape
    assert "rank 2: allreduce(float32[3], op=Average" in shape
    assert "different data types" in dtype
    assert "rank 0: allreduce(float32[3]" in dtype
    assert "different reduction ops" in op
    assert "op=Min" in op
    assert "prescale_factor=2.0" in scale
    assert "root_rank=2" in root
    assert "float32[rows, 4]" in rest
    assert "different numbers of tensors" in count


def _wait_for_different_things(world: World) -> tuple[str, list[float]]:
    hvd.init()
    beside = hvd.allreduce_async(torch.tensor([1.0]), name="beside", op=hvd.Sum)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.barrier() if world.rank == 2 else hvd.allreduce(torch.ones(1), name="ab"[world.rank])
    handle = hvd.allreduce_async(torch.ones(1), name="twice")
    with pytest.raises(ValueError, match="pending already"):
        hvd.allreduce_async(torch.ones(1), name="twice")
    hvd.synchronize(handle)
    return str(caught.value), hvd.synchronize(beside).tolist()


def test_ranks_that_wait_for_each_other_say_so(run_ranks: RunRanks) -> None:
    for result in run_ranks(_wait_for_different_things, 3):
        text, beside = result.get()
        assert "rank 0: waits for 'allreduce.a'" in text
        assert "rank 1: waits for 'allreduce.b'" in text
        assert "rank 2: waits for 'barrier'" in text
        assert "'allreduce.a' was not called on ranks 1-2" in text
        assert beside == [3.0]


def _run_out_of_data(world: World, order: list[int]) -> tuple[list[Any], int, list[float], int]:
    """Join one after another, in this order, but for the second time: then all at once."""
    hvd.init()
    queue.register("step", lambda: steps.append("as joined"))
    steps: list[Any] = []
    for number in range(2 + order.index(world.rank)):
        steps.append(hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum, name=f"step{number}").item())
        if number >= 2:
            queue.announce("step", lambda: steps.append("own"))
    last = hvd.join(-1)
    after = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).tolist()
    return steps, last, after, hvd.join()


def _calls_with_a_joined_rank(world: World) -> tuple[Any, ...]:
    hvd.init()
    if world.rank == 1:
        return ([], [], hvd.join())
    sparse = torch.tensor([1.0, 0.0]).to_sparse()
    calls: dict[str, Callable[[], object]] = {
        "allgather": lambda: hvd.allgather(torch.full((2, 1), world.rank)),
        "broadcast": lambda: hvd.broadcast(torch.tensor([1.0]), root_rank=2),
        "broadcast from it": lambda: hvd.broadcast(torch.ones(1), root_rank=1),
        "alltoall": lambda: hvd.alltoall(torch.ones(3)),
        "reducescatter": lambda: hvd.reducescatter(torch.ones(3)),
        "sparse": lambda: [hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)()],
        "object": lambda: hvd.broadcast_object(1),
    }
    errors = []
    means = []
    for number, (name, call) in enumerate(calls.items()):
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call()
        errors.append((name, str(caught.value)))
        # The joined rank continues with zeros.
        means.append(hvd.allreduce(torch.tensor([3.0]), name=f"mean{number}").item())
    return errors, means, hvd.join()


def test_operations_that_need_every_rank_raise_where_one_has_joined(run_ranks: RunRanks) -> None:
    first, joined, last = (result.get() for result in run_ranks(_calls_with_a_joined_rank, 3))
    errors, means, latest = first
    assert len(errors) == 7
    for name, error in errors:
        assert "needs every rank, and rank 1 called join()" in error, name
    assert means == [2.0] * 7, "a joined rank counts as one that gave zeros"
    assert latest == joined[2] == last[2] == 2
    assert last[1:] == first[1:]


def _joined_outside_of_the_set(world: World) -> list[int]:
    hvd.init()
    pair = hvd.add_process_set([0, 1])
    rows = hvd.allgather(torch.tensor([world.rank]), process_set=pair).tolist() if world.rank < 2 else []
    hvd.join()
    return rows


def test_a_rank_outside_of_the_process_set_may_have_joined(run_ranks: RunRanks) -> None:
    assert [result.get() for result in run_ranks(_joined_outside_of_the_set, 3)] == [[0, 1], [0, 1], []]


@pytest.mark.parametrize("order", [[0], [0, 1], [1, 0], [0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 2, 0]], ids=str)
def test_join(run_ranks: RunRanks, order: list[int]) -> None:
    world_size = len(order)
    for rank, result in enumerate(run_ranks(_run_out_of_data, world_size, order)):
        steps, last, after, again = result.get()
        place = order.index(rank)
        # Of step n take part the ranks that still have data.
        sums = [float(world_size - max(0, number - 1)) for number in range(2 + place)]
        assert [step for step in steps if isinstance(step, float)] == sums
        assert [step for step in steps if step == "own"] == ["own"] * place
        assert steps.count("as joined") == world_size - 1 - place
        assert last == order[-1]
        assert after == [float(world_size)]
        assert again == world_size - 1, "of those that join at once, the highest"


def _some_of_the_ranks(world: World) -> dict[str, Any]:
    outer, inner = hvd.ProcessSet([3, 0]), hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[outer, inner])
    own = outer if outer.included() else inner
    other = inner if own is outer else outer
    rank = world.rank
    got: dict[str, Any] = {"ids": (outer.process_set_id, inner.process_set_id), "place": (own.rank(), own.size())}
    # The sets' and the world's operations are under way at once, begun in different orders.
    handles = [
        lambda: hvd.allreduce_async(torch.tensor([float(rank)]), name="x", op=hvd.Sum),
        lambda: hvd.allreduce_async(torch.tensor([float(rank)]), name="x", op=hvd.Sum, process_set=own),
        lambda: hvd.allgather_async(torch.full((rank, 1), rank), process_set=own),
    ]
    order = [0, 1, 2] if rank % 2 else [2, 1, 0]
    begun = {number: handles[number]() for number in order}
    got["results"] = [hvd.synchronize(begun[number]).flatten().tolist() for number in range(3)]
    leaf = torch.ones(2, requires_grad=True)
    hvd.broadcast(leaf, root_rank=3 if own is outer else 2, process_set=own).mul(rank + 1.0).sum().backward()
    got["gradient"] = leaf.grad.tolist() if leaf.grad is not None else None
    hvd.barrier(process_set=own)
    with pytest.raises(ValueError, match=r"process_set\.included"):
        hvd.allreduce(torch.ones(1), process_set=other)
    with pytest.raises(ValueError, match="already"):
        hvd.add_process_set([0, 3])
    late = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum)
    if rank == 0:
        hvd.synchronize(late)
    three = hvd.add_process_set([2, 1, 0])
    if three.included():
        got["added"] = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, process_set=three).tolist()
    got["removed"] = [hvd.remove_process_set(one) for one in (three, three, hvd.global_process_set)]
    with pytest.raises(ValueError, match="not in use"):
        hvd.barrier(process_set=three)
    got["sizes"] = (three.size(), hvd.global_process_set.size(), str(three))
    hvd.shutdown()
    assert not hvd.is_initialized()
    return got


def test_process_sets(run_ranks: RunRanks) -> None:
    for rank, result in enumerate(run_ranks(_some_of_the_ranks, 4)):
        got = result.get()
        members = [0, 3] if rank in (0, 3) else [1, 2]
        assert got["ids"] == (1, 2)
        assert got["place"] == (members.index(rank), 2)
        assert got["results"] == [[6.0], [3.0], [r for r in members for _ in range(r)]]
        mean = sum(r + 1.0 for r in members) / 2
        assert got["gradient"] == ([mean] * 2 if rank in (2, 3) else [0.0] * 2)
        assert got.get("added") == ([3.0] if rank != 3 else None)
        assert got["removed"] == [True, False, False]
        assert got["sizes"] == (None, 4, "ProcessSet(process_set_id=None, ranks=[0, 1, 2], mpi_comm=None)")


def _ends_with_operations_pending(world: World) -> torch.Tensor:
    hvd.init()
    target = torch.tensor([float(world.rank)])
    if world.rank:
        hvd.allreduce_async_(target, name="never waited for", op=hvd.Sum)
        if world.rank == 2:
            hvd.allreduce_async_(torch.ones(1), name="of one rank only")
    else:
        hvd.allreduce_(target, name="never waited for", op=hvd.Sum)
    rankwise.leave()
    return target


def test_leaving_carries_out_what_others_wait_for() -> None:
    assert [result.get().tolist() for result in testing.run_ranks(_ends_with_operations_pending, 3)] == [[3.0]] * 3


def _ends_too_early(world: World) -> str:
    hvd.init()
    text = ""
    if world.rank == 0:
        hvd.allreduce_async(torch.ones(1), name="never waited for")
    else:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name="waited for")
        text = str(caught.value)
    hvd.shutdown()
    return text


def test_waiting_for_a_rank_that_has_ended_is_an_error() -> None:
    _, text = (result.get() for result in testing.run_ranks(_ends_too_early, 2))
    assert "rank 0: has reached the end" in text
    assert "rank 1: waits for 'allreduce.waited for'" in text


def _never_comes(world: World) -> str:
    hvd.init()
    if world.rank == 1:
        return ""
    with pytest.raises(PeerMissing) as caught:
        hvd.allreduce(torch.ones(1), name="loss")
    return str(caught.value)


def test_a_wait_that_cannot_end_names_the_operation() -> None:
    text, _ = (result.get() for result in testing.run_ranks(_never_comes, 2))
    assert "hvd.allreduce 'loss' cannot complete: rank 1 has left" in text


def _calls_something_else(world: World) -> float:
    hvd.init()
    with pytest.raises(CollectiveMismatch):
        rankwise.all_reduce(1) if world.rank else hvd.allreduce(torch.ones(1), name="x")
    return hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item()


def test_a_call_that_failed_does_not_stay_pending(run_ranks: RunRanks) -> None:
    assert [result.get() for result in run_ranks(_calls_something_else, 2)] == [2.0, 2.0]


def _world_after_world(_: World) -> tuple[object, float]:
    hvd.init()
    old = hvd.allreduce_async(torch.ones(1))
    rankwise.leave()
    hvd.init()
    new = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    return hvd.synchronize(old), hvd.synchronize(new).item()


def test_a_handle_of_a_world_that_was_left_is_none_of_the_next() -> None:
    # Nothing started these ranks, so the next world is of one.
    assert [result.get() for result in testing.run_ranks(_world_after_world, 2)] == [(None, 1.0)] * 2
