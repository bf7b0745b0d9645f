# SPDX-License-Identifier: Apache-2.0
"""Broadcasts of parameters, optimizer state and objects, with which scripts start; and `hvd.SyncBatchNorm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from on_ranks import one_rank
from replicas import TOLERANCE, Parameters, largest_difference
from torch import nn

import rankwise.compat.horovod as hvd
from rankwise import testing

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World


def _parameters(world: World, root: int) -> list[Parameters]:
    hvd.init()
    given = []
    for how in ("state_dict", "named", "list", "tensors"):
        torch.manual_seed(world.rank)
        # What is sent of the last layer is not the parameter's own memory.
        scattered = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), scattered).double()
        model[1].running_mean.fill_(float(world.rank))  # type: ignore[union-attr,operator]
        model[1].num_batches_tracked.fill_(world.rank)  # type: ignore[union-attr,operator]
        if how == "state_dict":
            hvd.broadcast_parameters(model.state_dict(), root_rank=root)
        elif how == "named":
            hvd.broadcast_parameters(model.named_parameters(), root_rank=root)
        elif how == "list":
            hvd.broadcast_parameters(list(model.state_dict().items()), root_rank=root)
        else:
            hvd.broadcast_parameters(list(model.parameters()), root_rank=root)
        given.append({name: value.double().clone() for name, value in model.state_dict().items()})
    for wrong in (None, "weights", 3, {"epoch": 3}):
        with pytest.raises(ValueError, match="broadcast_parameters takes"):
            hvd.broadcast_parameters(wrong, root_rank=root)  # type: ignore[arg-type]
    return given


def test_parameters_of_the_root_in_place(run_ranks: RunRanks) -> None:
    results = [result.get() for result in run_ranks(_parameters, 3, 1)]
    for given in results:
        for parameters, of_root in zip(given, results[1], strict=True):
            trained = {name for name in parameters if "running" not in name and "num_" not in name}
            assert all(torch.equal(parameters[name], of_root[name]) for name in trained)
    assert [given[0]["1.num_batches_tracked"].item() for given in results] == [1.0, 1.0, 1.0]
    assert [given[1]["1.num_batches_tracked"].item() for given in results] == [0.0, 1.0, 2.0]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {}, "Adamax": {}, "ASGD": {}, "NAdam": {},
    "RAdam": {}, "RMSprop": {"momentum": 0.9, "centered": True}, "Rprop": {}, "SGD": {"momentum": 0.9},
}  # fmt: skip


def _states(world: World, wrapped: bool) -> dict[str, Any]:
    """Step on the root only, then broadcast."""
    hvd.init()
    given: dict[str, Any] = {}
    for name, options in OPTIMIZERS.items():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer: Any = getattr(torch.optim, name)(model.parameters(), lr=0.5 / (world.rank + 1), **options)
        if world.rank == 1:
            for _ in range(2):
                model(torch.ones(4, 3)).square().mean().backward()
                optimizer.step()
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        # What the state is good for: the same next step everywhere.
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        given[name] = (optimizer.state_dict(), dict(model.state_dict()))
    return given


@pytest.mark.parametrize("wrapped", [False, True])
def test_states_that_only_the_root_has(wrapped: bool) -> None:
    results = [result.get() for result in testing.run_ranks(_states, 3, wrapped)]
    for name in OPTIMIZERS:
        (of_root, parameters_of_root) = results[1][name]
        assert of_root["state"], name
        for given in results:
            state, parameters = given[name]
            assert state["param_groups"] == of_root["param_groups"], name
            assert largest_difference(parameters, parameters_of_root) < 1e-6, name
            for number, entries in of_root["state"].items():
                for key, value in entries.items():
                    assert type(state["state"][number][key]) is type(value)
                    if not wrapped:
                        assert torch.equal(torch.as_tensor(state["state"][number][key]), torch.as_tensor(value))


def _odd_states(world: World) -> tuple[Any, ...]:
    hvd.init()
    model = nn.Linear(3, 2)
    fresh = torch.optim.Adam(model.parameters(), lr=0.1 * (world.rank + 1), betas=(0.5, 0.6 + world.rank / 10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hvd.broadcast_optimizer_state(fresh, root_rank=0, model=model)
    untouched = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), root_rank=0)
    group = fresh.param_groups[0]
    return untouched, len(fresh.state), group["lr"], group["betas"], group["maximize"], group["foreach"]


def test_a_fresh_optimizer_stays_fresh_and_options_keep_their_types() -> None:
    for result in testing.run_ranks(_odd_states, 2):
        assert result.get() == (True, 0, 0.1, (0.5, 0.6), False, None)


def _objects(world: World) -> tuple[Any, ...]:
    hvd.init()
    own = {"rank": world.rank, "text": "x" * 10 * world.rank}
    some = hvd.add_process_set([1, 2])
    within = hvd.broadcast_object(own if world.rank == 2 else None, 2, process_set=some) if some.included() else None
    return (
        hvd.broadcast_object(own if world.rank == 1 else None, root_rank=1),
        hvd.broadcast_object(own, name="named"),
        hvd.allgather_object(own if world.rank else None, name="all"),
        within,
    )


def test_objects(run_ranks: RunRanks) -> None:
    objects = [{"rank": rank, "text": "x" * 10 * rank} for rank in range(3)]
    for rank, result in enumerate(run_ranks(_objects, 3)):
        expected = (objects[1], objects[0], [None, *objects[1:]], objects[2] if rank else None)
        assert result.get() == expected


ROWS = (5, 1, 3)
"""The sizes of the ranks' batches."""


def _normed(world: World, momentum: float | None) -> tuple[Parameters, torch.Tensor]:
    hvd.init()
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(2, 5, 2, bias=False), hvd.SyncBatchNorm(5, momentum=momentum), nn.Tanh()).double()
    rows = torch.randn(2, sum(ROWS), 2, 4, 3, dtype=torch.float64)
    inputs = []
    for batch in rows:
        own = batch.split(ROWS)[world.rank] if world.world_size > 1 else batch
        inputs.append(own.clone().requires_grad_())
        model(inputs[-1]).square().sum().backward()
    gradients = {name: hvd.allreduce(p.grad, op=hvd.Sum) for name, p in model.named_parameters()}
    statistics = {name: value.double() for name, value in model.named_buffers()}
    model.eval()
    statistics["eval"] = model(rows[0]).detach()
    of_inputs = hvd.allgather(torch.stack([x.grad for x in inputs], 1))  # type: ignore[arg-type,misc]
    return {**gradients, **statistics}, of_inputs


@pytest.mark.parametrize("momentum", [0.1, 0.0, None])
def test_batchnorm_over_unequal_batches_is_that_of_the_whole_batch(run_ranks: RunRanks, momentum: float | None) -> None:
    reference, of_inputs = one_rank(_normed, momentum)
    for result in run_ranks(_normed, 3, momentum):
        values, gradients = result.get()
        assert largest_difference(values, reference) < TOLERANCE
        assert (gradients - of_inputs).abs().max() < TOLERANCE
