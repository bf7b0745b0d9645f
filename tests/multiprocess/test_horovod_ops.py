# SPDX-License-Identifier: Apache-2.0
"""Horovod's operations return Horovod's results, on 1 to 4 ranks; all its names exist."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch

import rankwise as rw
import rankwise.compat.horovod as hvd
from rankwise import testing
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, NotJoined

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

pytestmark = pytest.mark.every_exchange

WORLD_SIZES = [1, 2, 3, 4]

# What `horovod.torch` 0.28.1 has.
NAMES_OF_HOROVOD = """
elastic Compression allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
allreduce allreduce_async allreduce_ allreduce_async_
grouped_allreduce grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async
allgather allgather_async grouped_allgather grouped_allgather_async
broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async
reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async
join barrier poll synchronize init shutdown is_initialized start_timeline stop_timeline
size local_size cross_size rank local_rank cross_rank
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built
nccl_built ddl_built ccl_built cuda_built rocm_built
ProcessSet global_process_set add_process_set remove_process_set
Average Sum Adasum Min Max Product HorovodInternalError DistributedOptimizer SyncBatchNorm
"""

_REDUCED = "tensor average name {}op prescale_factor postscale_factor process_set"
_SCATTERED = "tensor name {}op process_set prescale_factor postscale_factor"
ARGUMENTS_OF_HOROVOD = {
    "allreduce": _REDUCED.format("compression "),
    **dict.fromkeys(("allreduce_", "allreduce_async", "allreduce_async_"), _REDUCED.format("")),
    "reducescatter": _SCATTERED.format("compression "),
    "reducescatter_async": _SCATTERED.format(""),
    **dict.fromkeys(("allgather", "allgather_async"), "tensor name process_set"),
    "sparse_allreduce_async": "tensor name op process_set",
    **dict.fromkeys(("alltoall", "alltoall_async"), "tensor splits name process_set"),
    "init": "comm process_sets",
    "join": "device",
    "barrier": "process_set",
    **dict.fromkeys(("poll", "synchronize"), "handle"),
    **dict.fromkeys(("add_process_set", "remove_process_set"), "process_set"),
    "start_timeline": "file_path mark_cycles",
}
for _name in [name for name in ARGUMENTS_OF_HOROVOD if name.startswith(("allreduce", "allgather", "reducescatter"))]:
    ARGUMENTS_OF_HOROVOD[f"grouped_{_name}"] = ARGUMENTS_OF_HOROVOD[_name].replace("tensor", "tensors")
for _name in ("broadcast", "broadcast_", "broadcast_async", "broadcast_async_"):
    ARGUMENTS_OF_HOROVOD[_name] = "tensor root_rank name process_set"


def test_arguments_are_in_the_order_of_horovod() -> None:
    ours = {name: " ".join(inspect.signature(getattr(hvd, name)).parameters) for name in ARGUMENTS_OF_HOROVOD}
    assert ours == ARGUMENTS_OF_HOROVOD
    assert [int(op) for op in (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)] == list(range(6))


def test_every_name_of_horovod_is_there() -> None:
    names = NAMES_OF_HOROVOD.split()
    assert [name for name in names if not hasattr(hvd, name)] == []
    assert set(names) <= set(hvd.__all__)


def test_a_missing_name_raises_with_the_alternative() -> None:
    with pytest.raises(hvd.NotOffered, match="rankwise run -n 4"):
        hvd.horovodrun  # noqa: B018 - the name is what is tested
    with pytest.raises(NotImplementedError, match=r"hvd\.DistributedOptimizer"):
        hvd.DistributedGradientTape  # noqa: B018 - the name is what is tested
    with pytest.raises(AttributeError, match="allreduce_async_"):
        hvd.all_reduce  # noqa: B018


def test_before_init_calls_are_value_errors() -> None:
    assert not hvd.is_initialized()
    for call in (
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.cross_size,
        hvd.stop_timeline,
        hvd.join,
        lambda: hvd.start_timeline("t.json"),
    ):
        with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
            call()
    with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
        hvd.allreduce(torch.ones(2))


FACTORS = ((1.0, 1.0), (0.5, 1.0), (0.5, 3.0))
"""The factors before and after a sum."""


def _given(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(15, dtype=torch.float64).view(5, 3) - 7 + 3 * rank).to(dtype)


def _facts(world: World) -> tuple[Any, ...]:
    assert not hvd.is_initialized()
    hvd.init()
    hvd.init()
    facts = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    assert hvd.is_initialized()
    return (*facts, hvd.is_homogeneous(), hvd.mpi_enabled(), hvd.global_process_set.ranks)


def test_facts(run_ranks: RunRanks) -> None:
    facts = [result.get() for result in run_ranks(_facts, 3)]
    assert facts == [(rank, 3, rank, 3, 0, 1, True, False, [0, 1, 2]) for rank in range(3)]


def _shut_down(world: World) -> None:
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == world.world_size
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert rw.all_reduce(1) == world.world_size, "the world is not its own to leave"
    rw.leave()
    hvd.init()
    assert hvd.size() == 1, "nobody has started this process for another world"
    hvd.shutdown()
    with pytest.raises(NotJoined):
        rw.barrier()


def test_shutdown_leaves_the_world_that_init_joined(run_ranks: RunRanks) -> None:
    for result in run_ranks(_shut_down, 2):
        result.get()


def _reduce(world: World) -> dict[str, Any]:
    hvd.init()
    got: dict[str, Any] = {}
    for dtype in (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64):
        given = _given(world.rank, dtype)
        for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
            got[f"{dtype} {op.name}"] = hvd.allreduce(given, op=op, name=f"{dtype} {op.name}")
        got[f"{dtype} scaled"] = hvd.allreduce(given, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
        assert torch.equal(given, _given(world.rank, dtype)), "the argument stays"
    # Under way at once: small tensors travel together, and each keeps factors of its own.
    given = _given(world.rank, torch.float64)
    handles = [
        hvd.allreduce_async(given, name=f"{before} {after}", op=hvd.Sum, prescale_factor=before, postscale_factor=after)
        for before, after in FACTORS
    ]
    got["differently scaled"] = [hvd.synchronize(handle) for handle in handles]
    got["number"] = hvd.allreduce(torch.tensor(float(world.rank)), op=hvd.Sum)
    got["empty"] = hvd.allreduce(torch.empty(0, 3))
    target = _given(world.rank, torch.float64)
    assert hvd.allreduce_(target, op=hvd.Sum) is target
    got["in place"] = target
    many = [torch.full((size,), float(world.rank + size), dtype=torch.float64) for size in (1, 7, 300_000, 0)]
    got["grouped"] = hvd.grouped_allreduce(iter(many), op=hvd.Sum)  # pyright: ignore[reportArgumentType]
    returned = hvd.grouped_allreduce_(many, op=hvd.Sum)
    assert all(a is b for a, b in zip(returned, many, strict=True))
    got["grouped in place"] = many
    got["compressed"] = hvd.allreduce(_given(world.rank, torch.float64), compression=hvd.Compression.fp16, op=hvd.Sum)
    with pytest.warns(DeprecationWarning, match="op="):
        got["average=False"] = hvd.allreduce(_given(world.rank, torch.float64), average=False)
    return got


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_allreduce(run_ranks: RunRanks, world_size: int) -> None:
    ways = {
        "AVERAGE": lambda all_: all_.sum(0) / world_size,
        "SUM": lambda all_: all_.sum(0),
        "MIN": lambda all_: all_.amin(0),
        "MAX": lambda all_: all_.amax(0),
        "PRODUCT": lambda all_: all_.prod(0),
    }
    for result in run_ranks(_reduce, world_size):
        got = result.get()
        for dtype in (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64):
            wide = torch.stack([_given(rank, torch.float64) for rank in range(world_size)])
            for name, way in ways.items():
                # Integers are cut towards zero, as by the conversion.
                torch.testing.assert_close(got[f"{dtype} {name}"], way(wide).to(dtype))
            halves = torch.stack([(0.5 * _given(r, torch.float64)).to(dtype).double() for r in range(world_size)])
            torch.testing.assert_close(got[f"{dtype} scaled"], (3.0 * halves.sum(0)).to(dtype))
        total = torch.stack([_given(rank, torch.float64) for rank in range(world_size)]).sum(0)
        for (before, after), scaled in zip(FACTORS, got["differently scaled"], strict=True):
            torch.testing.assert_close(scaled, before * after * total)
        assert got["number"].shape == ()
        assert got["number"] == sum(range(world_size))
        assert got["empty"].shape == (0, 3)
        for name in ("in place", "compressed", "average=False"):
            assert torch.equal(got[name], total)
        for place, size in enumerate((1, 7, 300_000, 0)):
            once = float(sum(rank + size for rank in range(world_size)))
            assert torch.equal(got["grouped"][place], torch.full((size,), once, dtype=torch.float64))
            assert torch.equal(got["grouped in place"][place], got["grouped"][place])
            assert got["grouped"][place].untyped_storage().nbytes() == 8 * size, "no view of a larger buffer"


def _move(world: World) -> dict[str, Any]:
    hvd.init()
    rank, size = world.rank, world.world_size
    got: dict[str, Any] = {}
    # Rank 1 has no rows.
    rows = torch.full((0 if rank == 1 else rank + 1, 2), rank, dtype=torch.int16)
    got["gathered"] = hvd.allgather(rows)
    got["grouped"] = hvd.grouped_allgather([rows, rows.double() + 0.5], name="two")
    last = size - 1
    got["broadcast"] = hvd.broadcast(torch.full((3,), rank, dtype=torch.uint8), root_rank=last)
    target = torch.full((2, 2), float(rank))
    assert hvd.broadcast_(target, root_rank=last) is target
    got["in place"] = target
    # Rank r sends r + to rows to rank `to`, and keeps one.
    splits = torch.tensor([rank + to for to in range(size)], dtype=torch.int32)
    sent = torch.tensor([[10 * rank + to] for to in range(size) for _ in range(rank + to)] + [[-1]])
    got["exchanged"], got["received"] = hvd.alltoall(sent, splits=splits)
    got["list"], _ = hvd.alltoall(sent, splits=splits.tolist())
    got["equal"] = hvd.alltoall(torch.arange(2 * size) + 100 * rank)
    got["async"] = hvd.synchronize(hvd.alltoall_async(torch.arange(size)))
    table = torch.arange(10, dtype=torch.float64).view(5, 2) * (rank + 1)
    got["scattered"] = hvd.reducescatter(table, op=hvd.Sum)
    got["averaged"] = hvd.grouped_reducescatter([table, table[:3]], prescale_factor=2.0, postscale_factor=3.0)
    entries = torch.sparse_coo_tensor(torch.tensor([[rank, 0], [0, 1]]), torch.tensor([1.0, 2.0]), (size, 2))
    got["sparse"] = hvd.sparse_allreduce_async(entries, name="embedding", op=hvd.Average)().to_dense()
    return got


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_moving(run_ranks: RunRanks, world_size: int) -> None:
    ranks = range(world_size)
    rows = torch.cat([torch.full((0 if rank == 1 else rank + 1, 2), rank, dtype=torch.int16) for rank in ranks])
    table = torch.arange(10, dtype=torch.float64).view(5, 2) * sum(rank + 1 for rank in ranks)
    sparse = torch.zeros(world_size, 2)
    sparse[:, 0] += 1 / world_size
    sparse[0, 1] += 2
    for own, result in enumerate(run_ranks(_move, world_size)):
        got = result.get()
        assert torch.equal(got["gathered"], rows)
        assert [part.tolist() for part in got["grouped"]] == [rows.tolist(), (rows.double() + 0.5).tolist()]
        assert got["broadcast"].tolist() == [world_size - 1] * 3
        assert torch.equal(got["in place"], torch.full((2, 2), float(world_size - 1)))
        assert got["exchanged"].flatten().tolist() == [10 * r + own for r in ranks for _ in range(r + own)]
        assert got["received"].tolist() == [r + own for r in ranks]
        assert got["received"].dtype == torch.int32
        assert torch.equal(got["list"], got["exchanged"])
        assert got["equal"].tolist() == [100 * r + 2 * own + i for r in ranks for i in range(2)]
        assert [part.tolist() for part in got["async"]] == [[own] * world_size, [1] * world_size]
        assert torch.equal(got["scattered"], table.tensor_split(world_size)[own])
        expected = [part.tensor_split(world_size)[own] * 6 / world_size for part in (table, table[:3])]
        torch.testing.assert_close(got["averaged"], expected)
        torch.testing.assert_close(got["sparse"], sparse)


def _combine(world: World) -> tuple[Any, ...]:
    hvd.init()
    if world.world_size == 3:
        with pytest.raises(NotImplementedError, match="power of two"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        return ()
    torch.manual_seed(world.rank)
    given = torch.randn(10_007, dtype=torch.float64)
    in_single = hvd.allreduce(given.float(), op=hvd.Adasum, postscale_factor=2.0)
    same = hvd.allreduce(torch.arange(3.0), op=hvd.Adasum)
    apart = hvd.allreduce(torch.eye(world.world_size)[world.rank], op=hvd.Adasum)
    return given, hvd.allreduce(given, op=hvd.Adasum), in_single, same, apart


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    common = torch.dot(a, b)
    return (1 - common / (2 * torch.dot(a, a))) * a + (1 - common / (2 * torch.dot(b, b))) * b


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_adasum(run_ranks: RunRanks, world_size: int) -> None:
    results = [result.get() for result in run_ranks(_combine, world_size)]
    if world_size == 3:
        return
    level = [result[0] for result in results]
    while len(level) > 1:
        level = [_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    for _, combined, in_single, same, apart in results:
        torch.testing.assert_close(combined, level[0])
        assert torch.equal(combined, results[0][1]), "the same bits on every rank"
        torch.testing.assert_close(in_single, 2 * level[0].float())
        torch.testing.assert_close(same, torch.arange(3.0))
        torch.testing.assert_close(apart, torch.ones(world_size))


def _wrong_calls(_: World) -> list[str]:
    hvd.init()
    errors = []
    for call in (
        lambda: hvd.allreduce([1.0]),  # pyright: ignore[reportArgumentType]
        lambda: hvd.allreduce(torch.ones(2, dtype=torch.uint8)),
        lambda: hvd.allreduce(torch.ones(2, 3).t()),
        lambda: hvd.allreduce(torch.ones(2).to_sparse()),
        lambda: hvd.allreduce(torch.ones(2), op=9),
        lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum, average=True),
        lambda: hvd.allgather(torch.tensor(1.0)),
        lambda: hvd.broadcast(torch.ones(2), root_rank=2),
        lambda: hvd.alltoall(torch.ones(3)),
        lambda: hvd.alltoall(torch.ones(3), splits=[2, 2]),
        lambda: hvd.alltoall(torch.ones(3), splits=torch.tensor([1, 1])),
        lambda: hvd.init(comm=[1]),
        lambda: hvd.barrier(None),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(ConfigurationError) as caught:
            call()
        errors.append(str(caught.value))
        is_internal = errors[-1].startswith(("allgather", "broadcast", "alltoall"))
        assert isinstance(caught.value, hvd.HorovodInternalError) == is_internal, "as Horovod has it"
    with pytest.raises(hvd.HorovodInternalError, match=r"hvd\.Average or hvd\.Sum"):
        hvd.reducescatter(torch.ones(2), op=hvd.Max)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2, "nothing was left behind"
    return errors


def test_wrong_arguments_say_what_to_do() -> None:
    first, second = (result.get() for result in testing.run_ranks(_wrong_calls, 2))
    assert first == second
    said = ["not list", "uint8", "contiguous()", "sparse_allreduce_async", "hvd.Average, Sum", "op= only", "reshape(1)"]
    said += [
        "ranks 0-1",
        "splits=",
        "at most the number of rows",
        "dtype=torch.int32",
        "process_sets=",
        "add_process_set",
    ]
    for part, text in zip(said, first, strict=True):
        assert part in text


IN_A_NOTE = {torch.float32: 60, torch.float64: 30, torch.int32: 60, torch.int64: 30, torch.bfloat16: 0}
"""The most numbers that travel with the report of their reduction."""


def _collectives_of_sums(world: World) -> dict[torch.dtype, list[int]]:
    hvd.init()
    detector = current().detector
    assert detector is not None
    counted: dict[torch.dtype, list[int]] = {}
    for dtype, most in IN_A_NOTE.items():
        for number in (most, most + 1):
            given = (torch.arange(number) % 7 - world.rank).to(dtype)
            before = detector.recorder.last
            total = hvd.allreduce(given, name="sum", op=hvd.Sum, prescale_factor=2.0)
            counted.setdefault(dtype, []).append(detector.recorder.last - before)
            expected = sum((torch.arange(number) % 7 - rank) * 2 for rank in range(world.world_size))
            assert torch.equal(total, torch.as_tensor(expected).to(dtype))
            assert torch.equal(given, (torch.arange(number) % 7 - world.rank).to(dtype))
    return counted


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_small_reduction_is_one_collective(world_size: int, run_ranks: RunRanks) -> None:
    for result in run_ranks(_collectives_of_sums, world_size):
        assert result.get() == {dtype: [1 if most else 2, 2] for dtype, most in IN_A_NOTE.items()}
