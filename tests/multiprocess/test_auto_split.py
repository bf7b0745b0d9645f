# SPDX-License-Identifier: Apache-2.0
"""Split calls, on rank zero with real servers: whatever a script does with them, it gets what plain torch gives."""

from __future__ import annotations

import random
import traceback
from collections import OrderedDict
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from served import Run, served
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint

from rankwise import testing
from rankwise.auto import connection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.world.facts import World

ROWS = 7
"""No number of ranks divides it."""
STEPS = 7
"""Four of which are split: the first, second and fourth call of a model are proofs."""


def _net(*, p: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(p), nn.Linear(6, 3))


def _batch(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS, 4)))


def _facts(model: nn.Module) -> list[torch.Tensor | None]:
    """Return copies of parameters, gradients and buffers."""
    gradients = [one.grad for one in model.parameters()]
    values = [*model.parameters(), *gradients, *model.buffers()]
    return [None if one is None else one.detach().clone() for one in values]


def _proved(model: nn.Module, *args: Any) -> None:
    """Call a model until its next three calls are split: the first, second, fourth and eighth call are proofs."""
    for _ in range(4):
        model(*args)


def training() -> object:
    model = _net(p=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(9):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(_batch()), torch.randint(3, (ROWS,)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, _facts(model)


def accumulated() -> object:
    model = _net()
    for _ in range(STEPS):
        (model(_batch()).square().mean() / 3).backward()
    return _facts(model)


def gradients_of_inputs() -> object:
    model, found = _net(), []
    for _ in range(STEPS):
        x = _batch().requires_grad_()
        model(x * 2).square().sum().backward()
        found.append(x.grad)
    return found, _facts(model)


def several_losses() -> object:
    model = _net()
    _proved(model, _batch())
    out = model(_batch())
    out.mean().backward(retain_graph=True)
    first = _facts(model)
    (out.logsumexp(0).sum() * 2).backward()
    return first, _facts(model)


def losses_of_two_calls() -> object:
    model = _net()
    _proved(model, _batch())
    one, two = model(_batch()), model(_batch())
    (one - two.detach()).square().mean().backward()
    two.square().mean().backward()
    return _facts(model)


def chosen_inputs() -> object:
    model = _net()
    x = _batch().requires_grad_()
    _proved(model, x)
    loss = model(x).square().sum()
    found = torch.autograd.grad(loss, [model[0].weight, x], retain_graph=True)
    unused = torch.autograd.grad(loss, [model[3].bias, torch.zeros(2, requires_grad=True)], allow_unused=True)
    loss = model(x).exp().sum()
    loss.backward(inputs=[model[3].weight])  # type: ignore[arg-type]
    return found, unused, _facts(model), x.grad


def hooks() -> object:
    """Torch promises no order among parameters: what each hook sees is kept by its name."""
    model, seen = _net(), dict[str, list[torch.Tensor]]()

    def noting(name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: seen.setdefault(name, []).append(gradient.clone())

    handles = [one.register_hook(noting(name)) for name, one in model.named_parameters()]
    model[0].weight.register_hook(lambda g: g * 2)
    model[3].weight.register_post_accumulate_grad_hook(lambda one: noting("accumulated")(one.grad))
    for number in range(STEPS):
        out = model(_batch())
        out.register_hook(noting("first"))
        out.register_hook(lambda g: g / 3)
        out.retain_grad()
        out.square().sum().backward()
        noting("last")(out.grad)
        if number == 5:
            handles[1].remove()
    return sorted(seen), [seen[name] for name in sorted(seen)], _facts(model)


class Weighted(nn.Module):
    """Takes a tensor that has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: torch.Tensor, other: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        out = (x @ self.weight).tanh() @ other
        return out if scale is None else out * scale


def parameters_as_arguments() -> object:
    model, outer = Weighted(), nn.Parameter(torch.randn(3, 5))
    own = []
    for _ in range(STEPS):
        model(_batch(), outer).square().sum().backward()
        model(_batch(), model.weight.T).exp().sum().backward()
        own.append(outer.grad.clone())
    return own, _facts(model)


def arguments_without_rows() -> object:
    model, found = Weighted(), []
    for _ in range(STEPS):
        other, scale = _batch(3, 2).requires_grad_(), torch.tensor(0.5, requires_grad=True)
        model(_batch(), other, scale=scale).square().sum().backward()
        found += [other.grad, scale.grad]
    return found, _facts(model)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.never = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, is_first: bool) -> torch.Tensor:
        return self.one(x) if is_first else self.two(x).sin()


def unused_parameters() -> object:
    model, found = Branches(), []
    for number in range(STEPS):
        model.zero_grad()
        model(_batch(), number % 2 == 0).square().sum().backward()
        found.append(_facts(model))
    return found


def frozen_parameters() -> object:
    model, found = _net(), []
    model[0].requires_grad_(False)
    for number in range(STEPS):
        if number == 3:
            model[0].requires_grad_(True)
            model[3].bias.requires_grad_(False)
        model(_batch()).square().sum().backward()
        found.append(_facts(model))
    return found


def outputs_in_place() -> object:
    model = _net()
    for _ in range(STEPS):
        out = model(_batch())
        out.mul_(2).add_(1)
        out[:, 0] = 0.0
        out[1:].relu_()
        out.square().sum().backward()
    with torch.no_grad():
        out = model(_batch())
        out.zero_()
    return out, _facts(model)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.layer(x).tanh()
        return out, out, out.exp()


def same_output_twice() -> object:
    model, found = Twice(), []
    for _ in range(STEPS):
        one, two, other = model(_batch())
        (one * two).sum().backward(retain_graph=True)
        (two.sum() + (other * one).sum()).backward()
        one.detach().mul_(2)
        found += [one.detach(), two.detach(), other.detach(), one is two]
    return found, _facts(model)


class ReturnsParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.layer(x).tanh()
        return out, out[:, :2], out.detach()


def parts_of_an_output() -> object:
    model, found = ReturnsParts(), []
    for _ in range(STEPS):
        one, part, alone = model(_batch())
        (part.sum() + (alone * one).sum()).backward()
        alone.mul_(2)
        found += [one.detach(), part.detach(), alone]
    return found, _facts(model)


class ReturnsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.layer(x)


def an_input_returned() -> object:
    model, found = ReturnsItsInput(), []
    for _ in range(STEPS):
        x = _batch().requires_grad_()
        same, out = model(x)
        (same.square().sum() + out.square().sum()).backward()
        found += [x.grad, same.detach(), out.detach()]
    return found, _facts(model)


def without_gradients() -> object:
    model, found = _net(p=0.5), []
    for _ in range(STEPS):
        with torch.no_grad():
            found.append(model(_batch()))
        with torch.inference_mode():
            out = model(_batch())
            found.append(out.clone())
            assert out.is_inference()
        assert not found[-2].requires_grad
    return found


def autocast() -> object:
    model, found = _net().float(), []
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(_batch().float())
        assert out.dtype is torch.bfloat16
        out.float().square().mean().backward()
        found.append(out.detach())
    return found, _facts(model)


def gradients_of_gradients() -> object:
    model, found = _net(), []
    for _ in range(STEPS):
        x = _batch().requires_grad_()
        out = model(x)
        (by_x,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().mean() + by_x.square().sum()).backward()
        found += [out.detach(), by_x.detach(), x.grad]
    return found, _facts(model)


def backward_twice() -> object:
    model = _net()
    _proved(model, _batch())
    loss = model(_batch()).sum()
    loss.backward()
    with pytest.raises(RuntimeError) as raised:
        loss.backward()
    model(_batch()).sum().backward()
    return str(raised.value), _facts(model)


def a_node_freed_below() -> object:
    """The graph above the call can run again; the call's own cannot."""
    model = _net()
    _proved(model, _batch())
    out = model(_batch())
    out.sum().backward()
    with pytest.raises(RuntimeError) as raised:
        (out * 2).sum().backward()
    return str(raised.value).partition(".")[0], _facts(model)


def updates_of_data() -> object:
    model = _net()
    for number in range(STEPS):
        loss = model(_batch()).square().mean()
        model.zero_grad()
        loss.backward()
        for one in model.parameters():
            one.data -= 0.1 * one.grad  # type: ignore[operator]
        if number == 3:
            model[0].weight.data = torch.ones(6, 4) / 5
        if number == 4:
            model[3].weight.data.numpy()[0, 0] = 7.0
    return _facts(model)


def values_between_forward_and_backward() -> object:
    """A bias plays no part in backward: torch lets it change."""
    model = _net()
    _proved(model, _batch())
    loss = model(_batch()).square().mean()
    with torch.no_grad():
        model[3].bias.add_(1)
    other = model(_batch()).square().mean()
    loss.backward()
    other.backward()
    return loss.detach(), other.detach(), _facts(model)


def a_weight_changed_before_backward() -> object:
    model = _net()
    _proved(model, _batch())
    loss = model(_batch()).square().mean()
    with torch.no_grad():
        model[3].weight.add_(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    model(_batch()).square().mean().backward()
    return _facts(model)


def loaded_state() -> object:
    model, found = _net(), []
    for number in range(STEPS):
        if number == 2:
            model.load_state_dict(_net().state_dict(), assign=True)
        if number == 4:
            model.load_state_dict(_net().state_dict())
        model(_batch()).square().sum().backward()
        found.append(_facts(model))
    return found


def another_dtype_half_way() -> object:
    model, found = _net().float(), []
    for number in range(STEPS):
        if number == 3:
            model.double()
            model.zero_grad()
        out = model(_batch().to(model[0].weight.dtype))
        out.square().sum().backward()
        found.append(out.detach())
    return found, _facts(model)


def a_layer_replaced() -> object:
    model, found = _net(), []
    for number in range(STEPS):
        if number == 3:
            model[3] = nn.Linear(6, 2)
        out = model(_batch())
        out.square().sum().backward()
        found.append(out.detach())
    return found, _facts(model)


def _normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=0.3), nn.ReLU(), nn.Linear(6, 3))


def batch_statistics() -> object:
    model, found = _normed(), []
    model.append(nn.BatchNorm1d(3, momentum=None))
    for _ in range(STEPS):
        model(_batch()).square().sum().backward()
        found.append(_facts(model))
    model.eval()
    found += [model(_batch()).detach() for _ in range(STEPS)]
    model.train()
    model(_batch()).sum().backward()
    return found, _facts(model)


def two_calls_with_statistics() -> object:
    """As Siamese networks do: both calls come before the backward."""
    model = _normed()
    for is_training in (True, False):
        model.train(is_training)
        for _ in range(STEPS):
            loss = (model(_batch()) - model(_batch())).square().mean()
            loss.backward()
    return _facts(model)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # type: ignore[operator]
        return self.layer(x) * self.scale


def two_calls_with_a_buffer() -> object:
    model, found = Scaled(), []
    for number in range(STEPS):
        if number == 3:
            model.scale.mul_(2)  # type: ignore[operator]
        one, two = model(_batch()), model(_batch())
        (one * two).sum().backward()
        found.append(_facts(model))
    return found


class FailsLate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, limit: float) -> torch.Tensor:
        out = self.layer(functional.dropout(self.norm(x)))
        if limit > 9:
            raise ValueError("limit is large")
        return out


def a_failing_call() -> object:
    model, found = FailsLate(), []
    for number in range(STEPS):
        limit = 10.0 if number == 5 else 1.0
        try:
            out = model(_batch(), limit)
        except ValueError as error:
            found.append(str(error))
        else:
            out.square().sum().backward()
        found += [_facts(model), torch.rand(()), random.random(), np.random.rand()]  # noqa: NPY002
    return found


class FailsByShape(nn.Module):
    """Fails in the middle of a call of a kind that was split before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layer(functional.dropout(self.norm(x))) * y


def a_failing_call_of_a_known_kind() -> object:
    model, found = FailsByShape(), []
    for number in range(STEPS):
        try:
            out = model(_batch(), _batch(ROWS, 2 if number == 5 else 3))
        except RuntimeError as error:
            found.append(str(error))
        else:
            out.square().sum().backward()
        found += [_facts(model), torch.rand(())]
    return found


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens).tanh()).view(-1, 11)


def flattened() -> object:
    model, found = Flat(), []
    for length in (5, 5, 3, 5, 6, ROWS):
        tokens = torch.randint(11, (ROWS, length))
        loss = functional.cross_entropy(model(tokens), tokens.view(-1))
        loss.backward()
        found += [loss.detach(), _facts(model)]
    return found


class FlatTimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(11, 4), nn.GRU(4, 5), nn.Linear(5, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out, _ = self.rnn(self.embed(tokens))
        return self.head(out).view(-1, 11)


def flattened_time_first() -> object:
    model, found = FlatTimeFirst(), []
    for length in (5, 5, 3, 5, 6):
        tokens = torch.randint(11, (length, ROWS))
        loss = functional.cross_entropy(model(tokens), tokens.view(-1))
        loss.backward()
        found += [loss.detach(), _facts(model)]
    return found


class Pair(NamedTuple):
    logits: torch.Tensor
    rest: dict[str, Any]


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 5, 2, batch_first=True), nn.Linear(5, 3)

    def forward(self, batch: Pair) -> Pair:
        out, hidden = self.rnn(batch.logits)
        rest = OrderedDict(hidden=hidden, last=[out[:, -1], 3, None], name=batch.rest["name"])
        return Pair(self.head(out) + batch.rest["shift"][:, None], rest)


def structures() -> object:
    model, found = Structured(), []
    for length in (3, 4, 3, 5):
        out = model(Pair(_batch(ROWS, length, 4), {"shift": _batch(ROWS, 3), "name": "x"}))
        assert type(out) is Pair
        (out.logits.sum() + out.rest["hidden"][1].square().sum()).backward()
        found.append([out.logits.detach(), out.rest["hidden"][0].detach(), type(out.rest).__name__, out.rest["last"]])
    return found, _facts(model)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.norm(self.convolution(x)).relu(), 0.5, self.training)


def channels_last() -> object:
    model, found = Pictures().to(memory_format=torch.channels_last), []
    for _ in range(STEPS):
        x = _batch(ROWS, 3, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
        out = model(x)
        out.square().sum().backward()
        assert x.grad is not None
        found += [out.detach(), out.stride(), x.grad, x.grad.stride()]
    return found, _facts(model)


def fewer_rows_than_ranks() -> object:
    model, found = _net(p=0.5), []
    for rows in (ROWS, 1, 2, 3, 1, 4, 0, ROWS):
        out = model(_batch(rows, 4))
        out.square().sum().backward()
        found.append(out.detach())
    return found, _facts(model)


class Varying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.layer(x), 0.4).tanh()


LENGTHS = (3, 5, 2, 6, 4, 8, 9, 3, 11, 10, 2, 12, 5, 13, 4, 14)


def varying_lengths() -> object:
    model, found = Varying(), []
    for length in LENGTHS:
        out = model(_batch(ROWS, length, 4))
        out.square().mean().backward()
        found.append(out.detach())
    return found, _facts(model)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = _net(p=0.5), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(checkpoint.checkpoint(self.one, x, use_reentrant=False))


def checkpointed() -> object:
    model, found = Checkpointed(), []
    for _ in range(STEPS):
        out = model(_batch())
        out.square().sum().backward()
        found.append(out.detach())
    return found, _facts(model)


def one_model_after_another() -> object:
    one, two = _net(), nn.Linear(3, 4)
    for _ in range(STEPS):
        hidden = one(_batch())
        out = one(two(hidden).tanh())
        (out.square().sum() + hidden.sum()).backward()
    return _facts(one), _facts(two)


class Summed(nn.Module):
    """Has two weights of which autograd gives both the same tensor as gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(_batch(3, 4)), nn.Parameter(_batch(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.one + self.two)


def one_gradient_for_two_weights() -> object:
    model = Summed()
    for _ in range(STEPS):
        model(_batch()).square().sum().backward()
    return _facts(model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def tied_parameters() -> object:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        functional.cross_entropy(
            model(torch.randint(11, (ROWS, 3))).transpose(1, 2), torch.randint(11, (ROWS, 3))
        ).backward()
        optimizer.step()
    return _facts(model)


def changed_hooks_and_modes() -> object:
    model, found = _net(p=0.5), []
    for number in range(8):
        model.train(number % 3 != 2)
        if number == 4:
            nn.utils.parametrizations.weight_norm(model[0])
        out = model(_batch())
        out.sum().backward()
        found.append(out.detach())
    return found, _facts(model)


def views_as_arguments() -> object:
    model, found = _net(), []
    data = _batch(2 * ROWS, 12).requires_grad_()
    for number in range(STEPS):
        out = model(data[::2, number : number + 4])
        out = out + model(data[:1, :4].expand(ROWS, 4))
        out.square().sum().backward()
        found.append(out.detach())
    return found, data.grad, _facts(model)


SITUATIONS: dict[str, Callable[[], object]] = {
    one.__name__: one
    for one in (
        training,
        accumulated,
        gradients_of_inputs,
        several_losses,
        losses_of_two_calls,
        chosen_inputs,
        hooks,
        parameters_as_arguments,
        arguments_without_rows,
        one_gradient_for_two_weights,
        unused_parameters,
        frozen_parameters,
        outputs_in_place,
        same_output_twice,
        parts_of_an_output,
        an_input_returned,
        without_gradients,
        autocast,
        gradients_of_gradients,
        backward_twice,
        a_node_freed_below,
        updates_of_data,
        values_between_forward_and_backward,
        a_weight_changed_before_backward,
        loaded_state,
        another_dtype_half_way,
        a_layer_replaced,
        batch_statistics,
        two_calls_with_statistics,
        two_calls_with_a_buffer,
        a_failing_call,
        a_failing_call_of_a_known_kind,
        flattened,
        flattened_time_first,
        structures,
        channels_last,
        fewer_rows_than_ranks,
        varying_lengths,
        checkpointed,
        one_model_after_another,
        tied_parameters,
        changed_hooks_and_modes,
        views_as_arguments,
    )
}
IN_ONE_JOB = 10
TOLERANCE = {"autocast": 0.05, "another_dtype_half_way": 1e-5}
"""Of 16 and 32 bits; of the others 1e-10."""
RUNS_WHOLE = {
    "an_input_returned": "it returns memory of its arguments or parameters, which the script could change",
    "parts_of_an_output": "it returns two tensors of one memory",
    "gradients_of_gradients": "gradients of its gradients are computed",
}
"""Situations in which calls run whole from some moment on, and why."""
NEVER_SPLIT = {"an_input_returned", "parts_of_an_output"}


def _started(situation: Callable[[], object]) -> object:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    try:
        return situation(), torch.rand(()), random.random()
    except Exception:  # noqa: BLE001 - whatever it raises, the next situation runs
        return traceback.format_exc()


def _all(world: World, names: Sequence[str], is_shared: bool) -> dict[str, tuple[object, Run]]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        expected = None if world.rank else _started(SITUATIONS[name])
        with mock.patch.object(connection, "_KEY", name):  # where rank zero announces its address
            found[name] = expected, served(world, _started, SITUATIONS[name], is_shared=is_shared)
    return found


@cache
def _results(num_ranks: int, is_shared: bool, number: int) -> dict[str, tuple[object, Run]]:
    """Return what situations come to. One job runs several: to start it takes longer than they do."""
    names = list(SITUATIONS)[number * IN_ONE_JOB :][:IN_ONE_JOB]
    return testing.run_ranks(_all, num_ranks, names, is_shared)[0].get()  # type: ignore[no-any-return]


def _check_same(found: object, expected: object, tolerance: float, where: str = "") -> None:
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple)
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            _check_same(one, other, tolerance, f"{where}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance), where
    else:
        assert found == expected, where


@pytest.mark.parametrize(("num_ranks", "is_shared"), [(2, True), (3, False)], ids=["2-shared", "3-sent"])
@pytest.mark.parametrize("name", SITUATIONS)
def test_a_script_gets_what_plain_torch_gives(name: str, num_ranks: int, is_shared: bool) -> None:
    expected, run = _results(num_ranks, is_shared, list(SITUATIONS).index(name) // IN_ONE_JOB)[name]
    _check_same(run.value, expected, TOLERANCE.get(name, 1e-10))
    assert run.num_split or name in NEVER_SPLIT
    assert all(RUNS_WHOLE.get(name, "?") in one for one in run.reasons), run.reasons
    assert bool(run.reasons) == (name in RUNS_WHOLE)
