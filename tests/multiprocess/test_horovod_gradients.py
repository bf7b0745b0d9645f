# SPDX-License-Identifier: Apache-2.0
"""Gradients through Horovod's operations, as Horovod defines them, on 1 to 4 ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import rankwise.compat.horovod as hvd

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

WORLD_SIZES = [1, 2, 3, 4]
ROWS = [2, 0, 3, 1]
"""The number of rows of each rank, if they differ."""


def _leaf(rank: int, num_rows: int = 5) -> torch.Tensor:
    values = torch.arange(num_rows * 2, dtype=torch.float64).view(num_rows, 2) + rank
    return values.requires_grad_()


def _weights(rank: int, *shape: int) -> torch.Tensor:
    """Return what rank ``rank`` multiplies its result with before it takes the sum: the gradient of the result."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _gradient(output: torch.Tensor, rank: int, *leaves: torch.Tensor) -> Any:
    gradients = torch.autograd.grad((output * _weights(rank, *output.shape)).sum(), leaves)
    return gradients[0] if len(leaves) == 1 else gradients


def _differentiate(world: World, members: list[int] | None) -> dict[str, Any]:
    """Differentiate on all ranks, or on those of a process set while the others have nothing to do."""
    own = hvd.global_process_set if members is None else hvd.ProcessSet(members)
    hvd.init(process_sets=[] if members is None else [own])
    if not own.included():
        return {}
    rank, size = own.rank(), own.size()
    last = world.world_size - 1 if members is None else members[-1]
    within = {"process_set": own}
    got: dict[str, Any] = {}
    leaf = _leaf(rank)
    got["average"] = _gradient(hvd.allreduce(leaf, **within), rank, leaf)
    scaled = hvd.allreduce(leaf, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0, **within)
    got["sum"] = _gradient(scaled, rank, leaf)
    compressed = hvd.allreduce(leaf, compression=hvd.Compression.fp16, **within)
    got["compressed"] = _gradient(compressed, rank, leaf)
    # The gradient of a plain sum is a number expanded, which is not contiguous.
    (got["expanded"],) = torch.autograd.grad(hvd.allreduce(leaf, op=hvd.Sum, **within).sum(), leaf)
    other = _leaf(rank, 3)
    group = hvd.grouped_allreduce([leaf, other], **within)
    got["grouped"] = _gradient(torch.cat(group), rank, leaf, other)
    got["broadcast"] = _gradient(hvd.broadcast(leaf, root_rank=last, **within), rank, leaf)
    uneven = _leaf(rank, ROWS[rank])
    got["gathered"] = _gradient(hvd.allgather(uneven, **within), rank, uneven)
    pair = hvd.grouped_allgather([uneven, leaf], **within)
    got["grouped gathered"] = _gradient(torch.cat(pair), rank, uneven, leaf)
    splits = [1] * size
    beyond = _leaf(rank, size + 1)
    exchanged, _ = hvd.alltoall(beyond, splits=splits, **within)
    got["exchanged"] = _gradient(exchanged, rank, beyond)
    for op in (hvd.Sum, hvd.Average):
        scattered = hvd.reducescatter(leaf, op=op, prescale_factor=2.0, postscale_factor=0.25, **within)
        got[f"scattered {op.name}"] = _gradient(scattered, rank, leaf)
    shares = hvd.grouped_reducescatter([leaf, other], op=hvd.Sum, **within)
    got["grouped scattered"] = _gradient(torch.cat(shares), rank, leaf, other)
    (once,) = torch.autograd.grad(hvd.allreduce(leaf**3, op=hvd.Sum, **within).sum(), leaf, create_graph=True)
    (got["twice"],) = torch.autograd.grad(once.sum(), leaf)
    return got


def _mean(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).mean(0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gradients(run_ranks: RunRanks, world_size: int) -> None:
    _check([result.get() for result in run_ranks(_differentiate, world_size, None)])


def test_gradients_within_a_process_set_need_no_other_rank(run_ranks: RunRanks) -> None:
    first, outside, second = (result.get() for result in run_ranks(_differentiate, 3, [0, 2]))
    assert outside == {}
    _check([first, second])


def _check(found: list[dict[str, Any]]) -> None:
    world_size = len(found)
    ranks = range(world_size)
    mean = _mean([_weights(rank, 5, 2) for rank in ranks])
    grouped = _mean([_weights(rank, 8, 2) for rank in ranks])
    num_rows = sum(ROWS[:world_size])
    gathered = _mean([_weights(rank, num_rows, 2) for rank in ranks])
    both = _mean([_weights(rank, num_rows + 5 * world_size, 2) for rank in ranks])
    first_of = [len(torch.arange(5).tensor_split(world_size)[rank]) for rank in ranks]
    second_of = [len(torch.arange(3).tensor_split(world_size)[rank]) for rank in ranks]
    shares = torch.cat([_weights(rank, first_of[rank], 2) for rank in ranks])
    of_two = [_weights(rank, first_of[rank] + second_of[rank], 2) for rank in ranks]
    for rank, got in enumerate(found):
        start = sum(ROWS[:rank])
        sent = torch.stack([_weights(to, world_size, 2)[rank] for to in ranks])
        expected = {
            "average": mean,
            "sum": 1.5 * world_size * mean,
            "expanded": torch.full((5, 2), float(world_size), dtype=torch.float64),
            "grouped": (grouped[:5], grouped[5:]),
            "broadcast": mean if rank == world_size - 1 else torch.zeros_like(mean),
            "gathered": gathered[start : start + ROWS[rank]],
            "grouped gathered": (
                both[start : start + ROWS[rank]],
                both[num_rows + 5 * rank : num_rows + 5 * (rank + 1)],
            ),
            "exchanged": torch.cat([sent, torch.zeros(1, 2, dtype=torch.float64)]),
            "scattered SUM": 0.5 * world_size * shares,
            "scattered AVERAGE": 0.5 * shares,
            "grouped scattered": (
                world_size * torch.cat([part[:num] for part, num in zip(of_two, first_of, strict=True)]),
                world_size * torch.cat([part[num:] for part, num in zip(of_two, first_of, strict=True)]),
            ),
            "twice": 6 * world_size * _leaf(rank).detach(),
        }
        compressed = got.pop("compressed")
        assert compressed.dtype == torch.float64
        torch.testing.assert_close(compressed, mean, rtol=1e-2, atol=1e-2)
        assert set(got) == set(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
