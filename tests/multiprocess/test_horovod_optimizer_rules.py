# SPDX-License-Identifier: Apache-2.0
"""`hvd.DistributedOptimizer`: its class, its refusals, and common operations around a step."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from on_ranks import one_rank
from replicas import TOLERANCE, Parameters, largest_difference, part
from torch import nn

import rankwise.compat.horovod as hvd
from rankwise import testing

if TYPE_CHECKING:
    from collections.abc import Callable

    from on_ranks import RunRanks

    from rankwise.world.facts import World


def built() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return (
        torch.randn(12, 5, generator=generator, dtype=torch.float64),
        torch.randn(12, 3, generator=generator, dtype=torch.float64),
    )


def loss_of(model: nn.Module, step: int, world: World) -> torch.Tensor:
    x, y = (part(t, world.rank, world.world_size) for t in batch(step))
    return nn.functional.mse_loss(model(x), y)


def kept(model: nn.Module) -> Parameters:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - which kind is what is asked
        kinds = [kind.__name__ for kind in (ValueError, AssertionError, NotImplementedError) if isinstance(error, kind)]
        return f"{'+'.join(kinds)}: {error}"
    return "nothing"


def _refusals(world: World) -> dict[str, str]:
    hvd.init()
    some = hvd.add_process_set([1])
    model = built()
    named = list(model.named_parameters())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    make = hvd.DistributedOptimizer
    said = {
        "tensors": _error_of(lambda: make(plain, list(model.parameters()))),
        "twice": _error_of(lambda: make(plain, [("a", p) for _, p in named])),
        "unnamed": _error_of(lambda: make(plain, named[:-1])),
        "passes": _error_of(lambda: make(plain, named, backward_passes_per_step=0)),
        "predivide": _error_of(lambda: make(plain, named, op=hvd.Sum, gradient_predivide_factor=2.0)),
        "groups": _error_of(lambda: make(plain, named, groups=-1)),
        "group twice": _error_of(lambda: make(plain, named, groups=[[model[0].weight], [model[0].weight]])),
        "set": _error_of(lambda: make(plain, named, op=hvd.Adasum, process_set=some)),
        "wrapped": _error_of(lambda: make(make(plain, named), named)),
        "model": _error_of(lambda: make(model)),  # type: ignore[arg-type]
        "function": _error_of(lambda: make(plain, model.named_parameters)),  # type: ignore[arg-type]
        "op": _error_of(lambda: make(plain, named, op="Average")),
        "compression": _error_of(lambda: make(plain, named, compression="fp16")),
        "unregistered set": _error_of(lambda: make(plain, named, process_set=hvd.ProcessSet([0, 1]))),
        "copy": _error_of(lambda: copy.deepcopy(make(plain, named))),
    }
    optimizer = make(plain, named)
    loss_of(model, 0, world).backward()
    said["zero_grad"] = _error_of(optimizer.zero_grad)
    said["too often"] = _error_of(lambda: loss_of(model, 0, world).backward())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.synchronize()
        optimizer.step()
    said["warned"] = " ".join(str(one.message) for one in caught)
    optimizer.zero_grad()
    adding = make(torch.optim.SGD(model.parameters(), lr=0.1), named, op=hvd.Adasum)
    said["skip"] = _error_of(lambda: adding.skip_synchronize().__enter__())
    return said


def test_refused_arguments_and_their_errors() -> None:
    for result in testing.run_ranks(_refusals, 2):
        said = result.get()
        for name in said.keys() - {"zero_grad", "too often", "skip", "set", "warned"}:
            assert said[name].startswith("ValueError: "), (name, said[name])
        assert "named_parameters=model.named_parameters()" in said["function"]
        assert "optimizer.state_dict()" in said["copy"]
        assert "by parameter group and index, with shapes: 0.3: [3]" in said["unnamed"]
        for name in ("zero_grad", "too often", "skip"):
            assert said[name].startswith("ValueError+AssertionError: "), (name, said[name])
        assert "0.weight: pass 2 of 1" in said["too often"] or "2.bias: pass 2 of 1" in said["too often"]
        assert said["set"].startswith("NotImplementedError: ")
        assert "skip_synchronize" in said["warned"]


def _same_optimizer(world: World) -> tuple[bool, bool, bool, str]:
    hvd.init()
    model = built()
    plain = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    loss_of(model, 0, world).backward()
    plain.step()
    plain.zero_grad()
    before = plain.state_dict()
    wrapped = hvd.DistributedOptimizer(plain, model.named_parameters())
    after = wrapped.state_dict()
    same = all(
        torch.equal(after["state"][n][k], value) for n, state in before["state"].items() for k, value in state.items()
    )
    scheduler = torch.optim.lr_scheduler.StepLR(wrapped, 1, gamma=0.5)
    loss_of(model, 1, world).backward()
    wrapped.step()
    scheduler.step()
    return isinstance(wrapped, torch.optim.Adam), same, wrapped.param_groups[0]["lr"] == 0.05, type(wrapped).__name__


def test_it_stays_the_optimizer_that_it_was() -> None:
    for result in testing.run_ranks(_same_optimizer, 2):
        assert result.get() == (True, True, True, "Adam")


def _more_passes_when_complete(world: World) -> tuple[Parameters, str]:
    hvd.init()
    model = built()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step, passes in enumerate((1, 1, 2)):
        for micro in range(passes):
            loss_of(model, 2 * step + micro, world).backward()
        if step == 1:
            # The gradients of this step are on their way: they are those of one pass.
            optimizer.set_backward_passes_per_step(2)
        optimizer.step()
        optimizer.zero_grad()
    # One more pass for the first layer, whose gradients are not complete; those of the second are.
    loss_of(model, 6, world).backward()
    model[2](torch.full((1, 7), world.rank + 0.5, dtype=torch.float64)).sum().backward()
    optimizer.set_backward_passes_per_step(3)
    model[0](torch.full((1, 5), world.rank + 0.5, dtype=torch.float64)).sum().backward()
    said = _error_of(lambda: model[2](torch.ones(1, 7, dtype=torch.float64)).sum().backward())
    optimizer.load_state_dict(optimizer.state_dict())
    return kept(model), said


def test_more_passes_when_complete() -> None:
    reference, _ = one_rank(_more_passes_when_complete)
    for result in testing.run_ranks(_more_passes_when_complete, 2):
        parameters, said = result.get()
        assert largest_difference(parameters, reference) < TOLERANCE
        assert said.startswith("ValueError+AssertionError: "), said
        assert "pass 3 of 2, complete before set_backward_passes_per_step(3)" in said


def _around(world: World) -> Parameters:
    """Go through what scripts do between steps."""
    hvd.init()
    model = built()
    head: nn.Linear = model[2]  # type: ignore[assignment]
    first: nn.Linear = model[0]  # type: ignore[assignment]
    first.bias.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), backward_passes_per_step=2
    )
    for step in range(4):
        if step == 1:
            optimizer.add_param_group({"params": list(head.parameters()), "lr": 0.05})
        if step == 2:
            optimizer.set_backward_passes_per_step(1)
            first.bias.requires_grad_(True)
        for micro in range(2 if step < 2 else 1):
            loss_of(model, 2 * step + micro, world).backward()
        optimizer.step()
        optimizer.zero_grad()
        head.zero_grad()
        if step == 2:
            # Of a step that never came, on its way already.
            loss_of(model, 20, world).backward()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 30, world)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return kept(model)


def test_new_groups_closures_and_loaded_states_keep_ranks_equal(run_ranks: RunRanks) -> None:
    reference = one_rank(_around)
    for world_size in (2, 3):
        for result in run_ranks(_around, world_size):
            assert largest_difference(result.get(), reference) < TOLERANCE


def _recovering(world: World) -> tuple[str, Parameters]:
    """Make the ranks wait for different operations while gradients are sent; then continue."""
    hvd.init()
    model = built()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    said = ""
    for step in range(5):
        state = optimizer.state_dict()
        if step == 2 and world.world_size > 1:
            loss_of(model, 40, world).backward()
            said = _error_of(optimizer.step if world.rank else lambda: hvd.allreduce(torch.ones(1), name="other"))
            optimizer.load_state_dict(state)
            optimizer.zero_grad()
        loss_of(model, step, world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return said, kept(model)


def test_ranks_that_wait_for_each_other_raise_and_can_continue(run_ranks: RunRanks) -> None:
    _, reference = one_rank(_recovering)
    for result in run_ranks(_recovering, 3):
        said, parameters = result.get()
        assert "'allreduce.other' was not called on ranks 1-2" in said
        assert "'DistributedOptimizer.0.0' was not called on rank 0" in said
        assert largest_difference(parameters, reference) < TOLERANCE


class Words(nn.Module):
    """Embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4, sparse=True)
        self.rare = nn.Embedding(5, 4, sparse=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, num_rare: int) -> torch.Tensor:
        y = self.words(x).mean(1)
        if num_rare:
            y = torch.cat([y[:num_rare] + self.rare(x[:num_rare, 0] % 5), y[num_rare:]])
        return self.last(y)


def _sparse(world: World, as_dense: bool) -> tuple[Parameters, bool]:
    hvd.init()
    torch.manual_seed(2)
    model = Words().double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse_as_dense=as_dense
    )
    is_sparse = True
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(0, 11, (12, 3), generator=generator)
        own = part(x, world.rank, world.world_size)
        # Of the 12 rows the last 4, all of rank 2, do without `rare`: it has no gradient there.
        num_rare = 8 if world.world_size == 1 else 4 * (world.rank < 2)
        model(own, num_rare).square().mean().backward()
        optimizer.step()
        is_sparse &= model.words.weight.grad is not None and model.words.weight.grad.is_sparse
        optimizer.zero_grad()
    return kept(model), is_sparse


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(run_ranks: RunRanks, as_dense: bool) -> None:
    reference, _ = one_rank(_sparse, as_dense)
    for result in run_ranks(_sparse, 3, as_dense):
        parameters, is_sparse = result.get()
        assert is_sparse
        assert largest_difference(parameters, reference) < TOLERANCE
