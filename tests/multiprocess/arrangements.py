# SPDX-License-Identifier: Apache-2.0
"""A small model distributed in every way torch supports, built without the strategies of rankwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise.checkpoint import layouts
from rankwise.checkpoint.manifest import whole
from rankwise.comm.session import current

if TYPE_CHECKING:
    from collections.abc import Callable


class Net(nn.Module):
    """Odd sizes, tied weights, buffers, something smaller than the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 130)
        self.block = nn.Sequential(nn.Linear(130, 130, bias=False), nn.Linear(130, 130, bias=False))
        self.block[1].weight = self.block[0].weight
        self.last = nn.Linear(130, 3)
        # Fewer elements than ranks: some hold none of it, and still have to know that the two are one.
        self.scale = nn.Parameter(torch.randn(2))
        self.tied_scale = self.scale


def mesh_of(shape: tuple[int, ...], *names: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    current().open_group()
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _one(model: Net, world_size: int) -> None:
    del model, world_size


def _shard(model: Net, world_size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of((world_size,), "dp_shard")
    for part in (model.first, model.block):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _hybrid(model: Net, world_size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh_of((world_size // 2, 2), "dp_replicate", "dp_shard"))


def _split_and_shard(model: Net, world_size: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of((world_size // 2, 2), "dp_shard", "tp")
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(model.first, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])


def _pipeline(model: Net, world_size: int) -> None:
    _keep_stage(model, current().world.rank, world_size)


def _split_and_pipeline(model: Net, world_size: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of((2, world_size // 2), "pp", "tp")
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    _keep_stage(model, mesh.get_local_rank("pp"), 2)


def _keep_stage(model: Net, stage: int, num_stages: int) -> None:
    """Leave each child on one stage; the others get meta tensors in its place."""
    memo: dict[int, nn.Parameter] = {}
    for number, child in enumerate(model.children()):
        if number % num_stages == stage:
            continue
        for module in child.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                meta = memo.setdefault(id(parameter), nn.Parameter(torch.empty_like(parameter, device="meta")))
                setattr(module, name, meta)
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty_like(buffer, device="meta"))


ARRANGEMENTS: dict[str, Callable[[Net, int], None]] = {
    "one": _one,
    "shard": _shard,
    "hybrid": _hybrid,
    "split and shard": _split_and_shard,
    "pipeline": _pipeline,
    "split and pipeline": _split_and_pipeline,
}


def built(arrangement: str, world_size: int, seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net().double()
    model.norm.running_mean.uniform_()  # type: ignore[union-attr, operator]
    ARRANGEMENTS[arrangement](model, world_size)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step with gradients that are the same whatever way the parameters lie."""
    for parameter in model.parameters():
        parameter.grad = None if parameter.is_meta else parameter.detach().clone().sin()
    optimizer.step()


def trained(arrangement: str, world_size: int) -> tuple[Net, torch.optim.Optimizer]:
    model, optimizer = built(arrangement, world_size)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def tensors_of(tree: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a module's, or an optimizer's, state by their keys."""
    entries = (
        {f"{key}.{name}": value for key, entry in tree["state"].items() for name, value in entry.items()}
        if ("state" in tree)
        else dict(tree)
    )
    return {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}


def check(here: Any, expected: Any) -> int:
    """Compare the parts on this rank with the whole; return how many tensors are elsewhere."""
    ours, theirs = tensors_of(here), tensors_of(expected)
    assert ours.keys() <= theirs.keys()
    num_elsewhere = len(theirs) - len(ours)
    for key, tensor in ours.items():
        if tensor.is_meta:
            num_elsewhere += 1
            continue
        region = layouts.region_of(tensor, key)
        memory = layouts.local(tensor)
        assert (region is None) == (memory.numel() == 0)
        if region is not None:
            assert torch.equal(memory, theirs[key][region.within(whole(tuple(theirs[key].shape)))]), key
    return num_elsewhere


def differing(here: Any, expected: Any) -> float:
    """Return the largest difference of this rank's parts from the whole, relative to each tensor's largest."""
    ours, theirs = tensors_of(here), tensors_of(expected)
    largest = 0.0
    for key, tensor in ours.items():
        region = layouts.region_of(tensor, key)
        if region is not None:
            reference = theirs[key]
            part = reference[region.within(whole(tuple(reference.shape)))]
            scale = reference.abs().max().clamp(min=1e-6)
            largest = max(largest, ((layouts.local(tensor) - part).abs().max() / scale).item())
    return largest
