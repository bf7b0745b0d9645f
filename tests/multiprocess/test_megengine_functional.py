# SPDX-License-Identifier: Apache-2.0
"""MegEngine's collectives: their values and gradients are those of one process that holds every rank's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

import rankwise.compat.megengine.distributed as dist
from rankwise import testing
from rankwise.compat.megengine.autodiff import GradManager
from rankwise.compat.megengine.functional import distributed as F  # noqa: N812 - MegEngine's own name
from rankwise.errors import CollectiveMismatch, ConfigurationError

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

pytestmark = pytest.mark.every_exchange

Tensors = list[torch.Tensor]
Plain = Callable[[Tensors], "list[torch.Tensor | None]"]


def _to_all(value: torch.Tensor, num: int) -> list[torch.Tensor | None]:
    return [value] * num


def _to_root(value: torch.Tensor, num: int) -> list[torch.Tensor | None]:
    return [value, *[None] * (num - 1)]


def _exchanged(xs: Tensors, split: int, concat: int) -> list[torch.Tensor | None]:
    parts = [x.tensor_split(len(xs), split) for x in xs]
    return [torch.cat([of_rank[place] for of_rank in parts], concat) for place in range(len(xs))]


CASES: dict[str, tuple[Callable[..., Any], Plain]] = {
    "reduce_sum": (F.reduce_sum, lambda xs: _to_root(sum(xs), len(xs))),
    "broadcast": (F.broadcast, lambda xs: _to_all(xs[0], len(xs))),
    "all_reduce_sum": (F.all_reduce_sum, lambda xs: _to_all(sum(xs), len(xs))),
    "all_reduce_max": (F.all_reduce_max, lambda xs: _to_all(torch.stack(xs).amax(0), len(xs))),
    "all_reduce_min": (F.all_reduce_min, lambda xs: _to_all(torch.stack(xs).amin(0), len(xs))),
}
for _axis in (0, 1, -1):
    CASES |= {
        f"all_gather {_axis}": (
            lambda x, group, axis=_axis: F.all_gather(x, group, axis=axis),
            lambda xs, axis=_axis: _to_all(torch.cat(xs, axis), len(xs)),
        ),
        f"gather {_axis}": (
            lambda x, group, axis=_axis: F.gather(x, group, axis=axis),
            lambda xs, axis=_axis: _to_root(torch.cat(xs, axis), len(xs)),
        ),
        f"scatter {_axis}": (
            lambda x, group, axis=_axis: F.scatter(x, group, axis=axis),
            lambda xs, axis=_axis: list(xs[0].tensor_split(len(xs), axis)),
        ),
        f"reduce_scatter_sum {_axis}": (
            lambda x, group, axis=_axis: F.reduce_scatter_sum(x, group, axis=axis),
            lambda xs, axis=_axis: list(sum(xs).tensor_split(len(xs), axis)),
        ),
    }
for _split in (0, 1):
    for _concat in (0, 2):
        CASES[f"all_to_all {_split} {_concat}"] = (
            lambda x, group, s=_split, c=_concat: F.all_to_all(x, group, split_axis=s, concat_axis=c),
            lambda xs, s=_split, c=_concat: _exchanged(xs, s, c),
        )


def _given(rank: int, num: int) -> torch.Tensor:
    """Return [3 num, num, 2 num], another for each rank, of numbers that no two ranks have alike."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3 * num, num, 2 * num, generator=generator, dtype=torch.float64)


def _loss(value: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a scalar that every element counts in differently, on every rank."""
    return (value * torch.linspace(1, 2 + rank, value.numel(), dtype=value.dtype).view(value.shape)).sum()


def _on_ranks(world: World, ranks: list[int] | None) -> dict[str, tuple[torch.Tensor | None, torch.Tensor]]:
    group = dist.WORLD if ranks is None else dist.new_group(ranks)
    if world.rank not in group.proc_ranks:
        return {}
    found: dict[str, tuple[torch.Tensor | None, torch.Tensor]] = {}
    for name, (call, _) in CASES.items():
        x = _given(world.rank, group.size)
        gm = GradManager().attach(x)
        with gm:
            value = call(x * 2, group)
            gm.backward(None if value is None else _loss(value, world.rank))
        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        found[name] = (None if value is None else value.detach(), gradient)
    return found


@pytest.mark.parametrize(
    ("world_size", "ranks"),
    [(1, None), (2, None), (3, None), (4, None), (2, [1, 0]), (3, [2, 0]), (4, [3, 0, 1]), (3, [1])],
)
def test_values_and_gradients(run_ranks: RunRanks, world_size: int, ranks: list[int] | None) -> None:
    members = list(range(world_size)) if ranks is None else ranks
    found = [result.get() for result in run_ranks(_on_ranks, world_size, ranks)]
    assert [bool(one) for one in found] == [rank in members for rank in range(world_size)]
    for name, (_, plain) in CASES.items():
        leaves = [_given(rank, len(members)).requires_grad_() for rank in members]
        values = plain([leaf * 2 for leaf in leaves])
        sum(_loss(value, rank) for rank, value in zip(members, values, strict=True) if value is not None).backward()
        for rank, leaf, value in zip(members, leaves, values, strict=True):
            got, gradient = found[rank][name]
            expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            assert (got is None) == (value is None), name
            assert got is None or torch.allclose(got, value, rtol=1e-14), name
            assert torch.allclose(gradient, expected, rtol=1e-13), name


def _root_alone_counts(world: World) -> tuple[Any, ...]:
    """Elsewhere than on the root broadcast and scatter take anything; without gradients none are asked for."""
    is_root = world.rank == 0
    sent = F.broadcast(torch.arange(3) if is_root else None)
    parts = F.scatter(torch.arange(2 * world.world_size) if is_root else torch.zeros(()))
    with torch.no_grad():
        silent = F.broadcast(torch.ones(2, requires_grad=True) if is_root else None)
    return sent.dtype, sent.tolist(), parts.tolist(), silent.requires_grad


@pytest.mark.parametrize("world_size", [1, 3])
def test_only_the_root_s_tensor_counts(world_size: int) -> None:
    for rank, result in enumerate(testing.run_ranks(_root_alone_counts, world_size)):
        assert result.get() == (torch.int64, [0, 1, 2], [2 * rank, 2 * rank + 1], False)


def _chain(world: World) -> list[torch.Tensor]:
    """A layer on each rank; the last one's result goes back to the first, where the loss is."""
    torch.manual_seed(5)
    layers = torch.nn.ModuleList(torch.nn.Linear(3, 3, dtype=torch.float64) for _ in range(world.world_size))
    layer = layers[world.rank]
    last = world.world_size - 1
    gm = GradManager().attach(layer.parameters())
    for step in range(3):
        x = _given(step, 1).view(2, 3)
        with gm:
            if world.rank == 0:
                F.remote_send(layer(x).tanh(), 1)
                loss = F.remote_recv(last).square().mean()
                gm.backward(loss)
            else:
                F.remote_send(layer(F.remote_recv(world.rank - 1)).tanh(), (world.rank + 1) % world.world_size)
                gm.backward()
    return [parameter.grad for parameter in layer.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_layer_on_each_rank(world_size: int) -> None:
    torch.manual_seed(5)
    layers = torch.nn.ModuleList(torch.nn.Linear(3, 3, dtype=torch.float64) for _ in range(world_size))
    for step in range(3):
        x = _given(step, 1).view(2, 3)
        for layer in layers:
            x = layer(x).tanh()
        x.square().mean().backward()
    for layer, result in zip(layers, testing.run_ranks(_chain, world_size), strict=True):
        for parameter, gradient in zip(layer.parameters(), result.get(), strict=True):
            assert torch.allclose(parameter.grad, gradient, rtol=1e-13)


def _sent_without_a_way_back(world: World) -> list[Any]:
    """What is sent asks for a gradient that nothing on this rank would wait for."""
    x, gm = torch.ones(2, requires_grad=True), GradManager()
    if world.rank == 0:
        with pytest.raises(ConfigurationError, match="within `with gm:`"):
            F.remote_send(x, 1)
        with torch.no_grad():
            F.remote_send(x, 1)
        F.remote_send(x.detach(), 1)
        with pytest.raises(ConfigurationError, match="ended without"), gm:
            F.remote_send(x, 1)
        gm.record()
        F.remote_send(x, 1)
        gm.release()
    received = [F.remote_recv(0).requires_grad for _ in range(4)] if world.rank == 1 else []
    with pytest.raises(ConfigurationError, match="shape and dtype are sent"):
        F.remote_recv(0, (2,), "float32")
    total = F.reduce_sum(x)
    return [received, total is None or total.requires_grad]


def test_a_gradient_that_no_rank_would_wait_for() -> None:
    first, second = testing.run_ranks(_sent_without_a_way_back, 2)
    assert first.get() == [[], False]
    assert second.get() == [[False, False, True, True], True]


def _refused(world: World) -> list[str]:
    x = torch.ones(4, 5, requires_grad=True)
    errors: list[str] = []
    for call in (
        lambda: F.all_reduce_sum(3.0),
        lambda: F.all_reduce_sum(x, None),
        lambda: F.all_reduce_sum(x, device="gpu0:1"),
        lambda: F.all_gather(torch.ones(())),
        lambda: F.reduce_scatter_sum(x, axis=1),
        lambda: F.all_to_all(x, concat_axis=2),
        lambda: F.scatter(x if world.rank == 0 else None, axis=1),
        lambda: F.broadcast(None),
        lambda: torch.autograd.grad(F.all_reduce_sum(x).sum(), x, create_graph=True),
    ):
        with pytest.raises(ConfigurationError) as caught:
            call()
        errors.append(str(caught.value))
    with pytest.raises(CollectiveMismatch):
        F.all_reduce_sum(torch.ones(1 + world.rank))
    return errors


def test_refusals_say_what_to_write() -> None:
    for result in testing.run_ranks(_refused, 2):
        errors = result.get()
        words = [
            "takes a tensor, not float", "dist.new_group", ".to(device)", "reshape(1)", "axis 1 of [4, 5]",
            "got axis=2", "axis 1 of [4, 5]", "rank 0, got None", "not support second derivatives",
        ]  # fmt: skip
        assert [word for word, error in zip(words, errors, strict=True) if word not in error] == []
