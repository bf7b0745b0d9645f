# SPDX-License-Identifier: Apache-2.0
"""MegEngine's API on torch's tensors: training as on one rank, groups, values by name, samplers."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from on_ranks import one_rank
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankwise.compat.megengine as mge
import rankwise.compat.megengine.distributed as dist
from rankwise import testing
from rankwise.compat.megengine.autodiff import GradManager
from rankwise.compat.megengine.data import (
    Infinite,
    RandomSampler,
    ReplacementSampler,
    SequentialSampler,
)
from rankwise.compat.megengine.functional.distributed import all_reduce_sum
from rankwise.errors import CollectiveMismatch, ConfigurationError, NotJoined, PeerFailed, PeerMissing

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

SIZE = 24
"""A multiple of 1, 2, 3 and 4: a mean over ranks is a mean over samples if each has the same number."""


class Net(nn.Module):
    """Two ways through it, so that ranks may take different ones, and a layer that none takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.ways = nn.ModuleList(nn.Linear(7, 1) for _ in range(3))

    def forward(self, x: torch.Tensor, way: int = 0) -> torch.Tensor:
        return self.ways[way](self.first(x).tanh())


def _net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(SIZE, n, generator=generator, dtype=torch.float64) for n in (5, 1))


def _train(world: World, method: str, rounds: int) -> dict[str, torch.Tensor]:
    """Train as MegEngine's tutorial does; gradients of ``rounds`` batches add up before each step."""
    x, y = _data()
    net = _net(seed=world.rank)
    dist.bcast_list_(net.parameters())
    gm = GradManager().attach(net.parameters(), callbacks=[dist.make_allreduce_cb(method)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    sampler = SequentialSampler(range(SIZE), batch_size=SIZE // 2 // world.world_size)
    for _epoch in range(3):
        for batch in sampler:
            for number in range(rounds):
                with gm:
                    # Equal gradients would hide that those of one round replace those of another.
                    loss = (1 + number) * nn.functional.mse_loss(net(x[batch]), y[batch])
                    gm.backward(loss / (world.world_size if method == "SUM" else 1))
            optimizer.step()
            optimizer.zero_grad()
    assert net.ways[2].weight.grad is None
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("method", "rounds"), [("mean", 1), ("SUM", 2)])
def test_ranks_train_what_one_rank_trains(run_ranks: RunRanks, world_size: int, method: str, rounds: int) -> None:
    expected = one_rank(_train, method, rounds)
    for result in run_ranks(_train, world_size, method, rounds):
        for name, value in result.get().items():
            assert torch.allclose(value, expected[name], rtol=1e-11, atol=1e-13), name


def _different_ways(world: World, method: str) -> list[Any]:
    """Rank 1 takes another way than the others, the last rank none at all; earlier gradients stay."""
    net, seen = _net(), []
    x = torch.full((1, 5), 1.0 + world.rank, dtype=torch.float64)

    def doubled(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        seen.append(parameter)
        return gradient * 2

    gm = GradManager().attach(net.parameters(), [doubled, dist.make_allreduce_cb(method)])
    net.first.bias.grad = torch.full((7,), 100.0, dtype=torch.float64)
    gm.record()
    gm.backward(None if world.rank == 3 else net(x, way=int(world.rank == 1)))
    kept = [parameter.grad for parameter in net.parameters()]
    again = [None if gradient is None else gradient.clone() for gradient in kept]
    with gm:
        gm.backward(net(x, way=2))
    return [len(seen), again, net.ways[2].bias.grad.item()]


@pytest.mark.parametrize("method", ["mean", "sum"])
def test_ranks_that_use_different_parameters(run_ranks: RunRanks, method: str) -> None:
    net = _net()
    for rank in range(3):
        x = torch.full((1, 5), 1.0 + rank, dtype=torch.float64)
        (2 * net(x, way=int(rank == 1)) / (4 if method == "mean" else 1)).backward()
    net.first.bias.grad += 100.0
    for rank, result in enumerate(run_ranks(_different_ways, 4, method)):
        called, gradients, second = result.get()
        assert called == (4 if rank == 3 else 8)
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            assert (gradient is None) == (parameter.grad is None)
            assert gradient is None or torch.allclose(gradient, parameter.grad, rtol=1e-13)
        assert second == (2.0 if method == "mean" else 8.0)


def _parts(world: World) -> tuple[Any, ...]:
    """Gradients within two groups, each of its own parameters; what the groups say of themselves."""
    groups = [dist.new_group([2, 0]), dist.new_group([1])]
    own = next(group for group in groups if world.rank in group.proc_ranks)
    x = torch.ones(3, requires_grad=True)
    gm = GradManager().attach(x, dist.make_allreduce_cb("sum", own))
    with gm:
        gm.backward((x * (world.rank + 1)).sum())
    dist.group_barrier(own)
    dist.group_barrier()
    values = [torch.full((2,), float(world.rank))]
    dist.bcast_list_(values, own)
    other = groups[1 - groups.index(own)]
    with pytest.raises(ConfigurationError, match="is not in the group"):
        _ = other.rank
    return x.grad.tolist(), values[0].tolist(), own.rank, own.size, own.key, own.is_single_machine


def test_groups() -> None:
    found = [result.get() for result in testing.run_ranks(_parts, 3)]
    assert found == [
        ([4.0] * 3, [2.0] * 2, 1, 2, "2,0", True),
        ([2.0] * 3, [1.0] * 2, 0, 1, "1", True),
        ([4.0] * 3, [2.0] * 2, 0, 2, "2,0", True),
    ]


def _manager_alone(_: World) -> None:
    x, y = torch.ones(2), torch.ones((), dtype=torch.int64)
    gm = GradManager()
    with pytest.raises(RuntimeError, match="Nothing has been recorded"):
        gm.backward(x)
    for wrong, words in ((y, "int64"), (3.0, "not float"), (x.clone().requires_grad_() * 2, "result of an operation")):
        with pytest.raises(ConfigurationError, match=words):
            gm.attach([wrong])
    with pytest.raises(ConfigurationError, match=r"call it: gm\.attach\(net\.parameters\(\)\)"):
        gm.attach(nn.Linear(1, 1).parameters)
    with pytest.raises(ConfigurationError, match="frozen"):
        gm.attach(nn.Parameter(x.clone(), requires_grad=False))
    with gm:
        gm.attach(x)
        temporary = torch.ones(2)
        gm.attach([temporary], lambda _, gradient: gradient + 1)
        with pytest.raises(RuntimeError, match="already recording"):
            gm.record()
        gm.backward([x * temporary, x.sum(), y], [torch.tensor([2.0, 3.0]), torch.tensor(10.0), y])
    assert (x.grad.tolist(), temporary.grad.tolist()) == ([12.0, 13.0], [3.0, 4.0])
    assert [one is x for one in gm.attached_tensors()] == [True, False]
    del temporary
    gc.collect()
    assert len(gm.attached_tensors()) == 1
    with pytest.raises(ConfigurationError, match="one dy for each y"), gm:
        gm.backward([x * 2], [])
    gm.attach(x, lambda *_: None).record()
    with pytest.raises(ConfigurationError, match="must return a gradient, got None"):
        gm.backward(x.sum())
    assert x.grad.tolist() == [12.0, 13.0], "a backward that failed leaves what was there"
    other, z = GradManager(), torch.ones(2)
    with pytest.raises(ConfigurationError, match="as the last callback"):
        other.attach(z, [dist.make_allreduce_cb("mean"), lambda _, gradient: gradient])
    other, third = GradManager().attach(z), GradManager().attach(z)
    with other, third:
        other.backward(z * 3)
        third.backward()
    assert z.grad.tolist() == [3.0, 3.0]
    for wrong, words in (
        (lambda: dist.make_allreduce_cb("max"), "sum, mean"),
        (lambda: dist.new_group([0, 7]), "has only rank 0"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            wrong()
    with pytest.raises(ConfigurationError, match=r"gm\.attach"):
        dist.make_allreduce_cb("mean", backend="shm")(x, x)


def _plain_backward(world: World) -> None:
    """A backward outside the GradManager would leave every rank with gradients of its own."""
    x, y = torch.ones(2), torch.ones(2)
    reduced, own = GradManager().attach(x, dist.make_allreduce_cb("mean")), GradManager().attach(y)
    with pytest.raises(ConfigurationError, match=r"gm\.backward\(loss\)"):
        x.sum().backward()
    y.sum().backward()
    with pytest.raises(ConfigurationError, match=r"gm\.backward\(loss\)"), own:
        y.sum().backward()
    x.grad = None
    with reduced, own:
        own.backward(x.sum() + y.sum())
        reduced.backward(x.sum() * world.rank)
    assert (x.grad.tolist(), y.grad.tolist()) == ([0.5, 0.5], [3.0, 3.0])
    del reduced
    gc.collect()
    x.sum().backward()
    assert x.grad.tolist() == [1.5, 1.5]


def test_a_plain_backward_is_refused() -> None:
    for result in testing.run_ranks(_plain_backward, 2):
        result.get()


def _members_alone(world: World) -> None:
    if world.rank != 1:
        dist.new_group([0, 2])
    dist.group_barrier()


def test_a_group_that_only_its_members_open_is_refused() -> None:
    for rank, result in enumerate(testing.run_ranks(_members_alone, 3)):
        assert isinstance(result.error, CollectiveMismatch)
        assert ("dist.new_group([0, 2]) on every rank of the world" in str(result.error)) == (rank != 1)


def test_a_grad_manager_in_a_world_of_one() -> None:
    testing.run_ranks(_manager_alone, 1)[0].get()


def _values_by_name(world: World) -> list[Any]:
    client = dist.get_client()
    given = {"weights": torch.arange(6.0).view(2, 3).t(), 3: [None, (1, "é")], "array": np.arange(3)}
    if world.rank == world.world_size - 1:
        client.user_set("given", {})
        client.user_set("given", given)
        client.user_set("once", torch.empty(0, 2))
    got = client.user_get("given") or client.user_get("given")
    shapes = [list(client.user_pop("once").shape)] if world.rank == 0 else []
    dist.group_barrier()
    client.group_barrier(dist.WORLD.key, dist.WORLD.size)
    for call, words in (
        (lambda: client.user_set("x", object()), "cannot set"),
        (lambda: client.user_get(3), "a key must be a str"),
        (lambda: client.group_barrier("1", 1), "dist.group_barrier"),
    ):
        with pytest.raises(ConfigurationError, match=f"(?i){words}"):
            call()
    with pytest.raises(PeerMissing, match="no rank has set it"):
        client.user_get("once")
    equal = "weights" not in got or (torch.equal(got["weights"], given["weights"]) and got[3] == given[3])
    return [equal, shapes]


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_by_name(world_size: int) -> None:
    results = testing.run_ranks(_values_by_name, world_size, join_timeout_seconds=3.0)
    assert [result.get() for result in results] == [[True, [[0, 2]] if rank == 0 else []] for rank in range(world_size)]


def _wait_for_a_failing_rank(world: World) -> None:
    if world.rank == 1:
        raise ValueError("no data")
    dist.get_client().user_get("never")


def test_a_wait_for_a_value_ends_when_a_rank_fails() -> None:
    first, _ = testing.run_ranks(_wait_for_a_failing_rank, 2)
    assert isinstance(first.error, PeerFailed)
    assert "no data" in str(first.error)
    assert first.seconds < 20


def _sampled(world: World, length: int) -> list[list[list[int]]]:
    random = RandomSampler(range(length), batch_size=2)
    drawn = ReplacementSampler(range(length), 2, weights=[1.0, *[0.0] * (length - 1)])
    chosen = SequentialSampler(range(length), 2, drop_last=True, indices=list(range(length))[::-1])
    assert len(list(chosen)) == len(chosen)
    endless = Infinite(SequentialSampler(range(length), 2))
    several = [next(endless) for _ in range(2 * -(-length // world.world_size))]
    loader = DataLoader(TensorDataset(torch.arange(length)), batch_sampler=SequentialSampler(range(length), 3))
    assert len(loader) == len(list(loader))
    return [list(random), list(random), list(drawn), list(chosen), several]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_samplers_shard_in_megengine_s_order(world_size: int) -> None:
    length = 11
    num = -(-length // world_size)
    generator = np.random.RandomState(0)
    orders = [generator.permutation(length).tolist() for _ in range(2)]
    for rank, result in enumerate(testing.run_ranks(_sampled, world_size, length)):
        first, second, drawn, chosen, several = result.get()
        for order, batches in zip(orders, (first, second), strict=True):
            flat = [index for batch in batches for index in batch]
            part = [*order, *order][: num * world_size][rank::world_size]
            assert flat == part if world_size > 1 else sorted(flat) == sorted(part)
            assert {len(batch) for batch in batches[:-1]} == {2}
        assert {index for batch in drawn for index in batch} == {0}
        downwards = [*range(length)][::-1]
        expected = [*downwards, *downwards][: num * world_size][rank::world_size]
        assert [index for batch in chosen for index in batch] == expected[: num // 2 * 2]
        assert several[0] == several[-(-num // 2)]


def test_a_name_that_is_not_there_raises_with_the_one_to_use() -> None:
    for module, name, words in (
        (mge.data, "get_worker_info", "get_worker_info"),
        (mge.autodiff, "Function", r"torch\.autograd\.Function"),
        (mge.functional, "relu", r"torch\.nn\.functional"),
        (dist, "get_mm_server_addr", "dist.get_client"),
        (dist, "group_start", "one collective after another"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            getattr(module, name)
        assert module is mge.functional or not hasattr(module, "nothing")
    assert mge.functional.distributed.scatter is dist.functional.scatter
    assert dist.helper.get_device_count_by_fork("cpu") == 1
    with pytest.raises(ConfigurationError, match="smaller batch_size"):
        RandomSampler(range(3), batch_size=3, world_size=2, rank=0)
    with pytest.raises(NotJoined):
        all_reduce_sum(torch.ones(1))
    assert (dist.get_rank(), dist.get_world_size(), dist.is_distributed()) == (0, 1, False)
    dist.group_barrier()
    assert dist.synchronized(lambda: 3)() == 3
