# SPDX-License-Identifier: Apache-2.0
"""`replicate`: what cannot be exact, or is called wrongly, is an error that says what to do."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from replicas import Net, batches, built
from torch import nn

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError, ModelMismatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World


def _different(world: World, what: str) -> None:
    layers: list[nn.Module] = [nn.Linear(3, 4), nn.Linear(4, 2)]
    if world.rank == 2:
        if what == "shape":
            layers[1] = nn.Linear(4, 3)
        elif what == "dtype":
            layers[1] = nn.Linear(4, 2).double()
        elif what == "number":
            layers.append(nn.Linear(2, 2))
        elif what == "name":
            layers.insert(1, nn.ReLU())
    rw.replicate(nn.Sequential(*layers))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", ["1.weight", "float32[2, 4]", "float32[3, 4]"]),
        ("dtype", ["1.weight", "float64[2, 4]"]),
        ("number", ["nothing", "2.weight"]),
        ("name", ["1.weight", "2.weight"]),
    ],
)
def test_models_that_differ_are_an_error_naming_the_first_difference(what: str, words: list[str]) -> None:
    for result in testing.run_ranks(_different, 3, what):
        assert isinstance(result.error, ModelMismatch)
        text = str(result.error)
        assert "rank 2:" in text
        assert "ranks 0-1:" in text
        for word in words:
            assert word in text


class _LooksUp(nn.Module):
    """A layer of which nothing shows that its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.weight, sparse=True)


def _wrong_calls(_: World) -> list[str]:
    model = nn.Linear(2, 2)
    errors = []

    def attempt(call: Callable[[], object]) -> None:
        with pytest.raises(ConfigurationError) as caught:
            call()
        errors.append(str(caught.value))

    def sync_plain() -> None:
        with rw.no_sync(model):
            pass

    def no_number() -> None:
        with rw.weight(model, None):  # type: ignore[arg-type]
            pass

    def negative() -> None:
        with rw.weight(model, -1):
            model(torch.ones(2, 2)).sum().backward()

    attempt(sync_plain)
    attempt(lambda: rw.replicate(nn.ReLU()))
    rw.replicate(model)
    attempt(lambda: rw.replicate(model))
    attempt(negative)
    attempt(lambda: rw.replicate(nn.Linear(2, 2, device="meta")))
    attempt(no_number)
    looked_up = rw.replicate(_LooksUp())
    if rw.all_reduce(1) > 1:
        attempt(lambda: looked_up(torch.tensor([1])).sum().backward())
    return errors


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_calls_say_what_to_do(world_size: int) -> None:
    for result in testing.run_ranks(_wrong_calls, world_size):
        errors = result.get()
        assert "neither replicated nor sharded" in errors[0]
        assert "no parameter that needs a gradient" in errors[1]
        assert "already" in errors[2]
        assert "at least 0" in errors[3]
        assert "model.to_empty(device=world.device)" in errors[4]
        assert "rankwise.weight() takes one number, got NoneType." in errors[5]
        if world_size > 1:
            assert "Parameter weight has a sparse gradient" in errors[6]
            assert "torch.nn.Embedding(..., sparse=True)" in errors[6]


class _Padded(nn.Linear):
    def forward(self, tokens: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens * mask)


def _wrong_weights(_: World) -> list[str]:
    tokens = torch.ones(2, 2)
    own = {"tokens": tokens, "mask": tokens}
    given: list[tuple[Any, dict[str, Any]]] = [
        (lambda tokens: float(len(tokens)), own),
        (lambda tokens, mask: None, own),
        (lambda tokens, mask: mask.sum(1), own),
        (lambda tokens, mask: len(mask) + "1", own),
    ]
    found = []
    for weight, inputs in given:
        model = rw.replicate(_Padded(2, 2), weight=weight)
        with pytest.raises((ConfigurationError, TypeError)) as caught:
            model(**inputs)
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


def test_a_weight_function_that_does_not_fit_the_call_is_told_from_one_that_fails() -> None:
    for result in testing.run_ranks(_wrong_weights, 2):
        arguments, nothing, several, own = result.get()
        assert arguments.startswith("ConfigurationError: weight= is called with the arguments of model(...)")
        assert "the call has tokens=, mask=; " in arguments
        assert "unexpected keyword argument 'mask'" in arguments
        assert nothing.startswith("ConfigurationError: weight= must return one number, got NoneType.")
        assert several.startswith("ConfigurationError: weight= must return one number, got Tensor.")
        assert own.startswith("TypeError: unsupported operand")


def _change_after(world: World, how: str) -> str:
    del world
    model = rw.replicate(built(Net))
    x, y = batches([6])[0]
    nn.functional.mse_loss(model(x), y).backward()
    model.zero_grad()
    if how == "a layer":
        model.last = nn.Linear(8, 3).double()
    elif how == "assign":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    else:
        model.float()
        x = x.float()
    with pytest.raises(ConfigurationError) as caught:
        model(x)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("how", "name"), [("a layer", "last.weight"), ("assign", "first.weight"), ("dtype", "first.weight")]
)
def test_a_model_changed_after_replicate_is_an_error(how: str, name: str, world_size: int) -> None:
    for result in testing.run_ranks(_change_after, world_size, how):
        assert f"Parameter {name} " in result.get()
        assert "then" in result.get()


def _grown(world: World) -> list[Any]:
    """Grow a copy of a model while it trains."""
    del world
    torch.manual_seed(0)
    model = rw.replicate(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def epoch() -> None:
        for part in rw.DataLoader(x, global_batch_size=8):
            optimizer.zero_grad()
            (model(part) - 1).square().mean().backward()
            optimizer.step()

    epoch()
    with pytest.raises(ConfigurationError, match="and again after its parameters have changed"):
        rw.replicate(model)
    model, state = copy.deepcopy(model), optimizer.state_dict()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.load_state_dict(state)
    model.append(nn.Linear(1, 1).double())
    optimizer.add_param_group({"params": model[3].parameters()})
    rw.replicate(model)
    epoch()
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_model_that_has_grown_trains_as_a_copy(world_size: int) -> None:
    (one,) = testing.run_ranks(_grown, 1)
    for rank in testing.run_ranks(_grown, world_size):
        for mine, wanted in zip(rank.get(), one.get(), strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(wanted), rtol=0, atol=1e-6)


class OwnNorm(nn.BatchNorm1d):
    """A subclass, which may do anything."""


def _refused(world: World) -> list[str]:
    del world
    errors = []
    whole = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    rw.replicate(whole[0])
    with pytest.raises(ConfigurationError) as caught:
        rw.replicate(whole)
    errors.append(str(caught.value))
    with pytest.raises(ConfigurationError) as caught:
        rw.replicate(nn.Sequential(nn.Linear(3, 3), OwnNorm(3)), sync_batchnorm=True)
    errors.append(str(caught.value))
    return errors


def test_models_that_cannot_be_exact_are_refused() -> None:
    for result in testing.run_ranks(_refused, 2):
        nested, subclass = result.get()
        assert "replicate() was already called on a part" in nested
        assert "OwnNorm" in subclass


def _wrapped(_: World) -> list[str]:
    rw.mesh(dp_replicate=2)  # opens torch's group, which DistributedDataParallel needs
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    errors = []
    for model in (wrapped, nn.Sequential(nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 2)))):
        with pytest.raises(ConfigurationError) as caught:
            rw.replicate(model)
        errors.append(str(caught.value))
    rw.replicate(wrapped.module)
    return errors


def test_a_model_that_torch_spreads_already_is_refused_with_the_line_to_write() -> None:
    for result in testing.run_ranks(_wrapped, 2):
        whole, part = result.get()
        assert whole == (
            "replicate() was given a model in DistributedDataParallel, which spreads it over devices too.\n"
            "  do        omit DistributedDataParallel(...): call rankwise.replicate() with the model that was passed "
            "to it"
        )
        assert "\n  evidence  it is the part 1 of the model\n  do        omit DataParallel(...)" in part


def _counting_rows(_: World) -> list[str]:
    model = nn.Sequential(nn.Embedding(4, 2, scale_grad_by_freq=True))
    with pytest.raises(ConfigurationError) as caught:
        rw.replicate(model)
    return [str(caught.value)]


def test_gradients_divided_by_how_often_a_row_occurs_are_refused_on_several_ranks() -> None:
    for result in testing.run_ranks(_counting_rows, 2):
        (error,) = result.get()
        assert "The Embedding 0 divides each row's gradient by how often the row occurs in a batch" in error
