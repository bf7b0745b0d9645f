# SPDX-License-Identifier: Apache-2.0
"""Who is called around steps of optimizers and around backward, in which order, and until when."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.optim.optimizer as torch_optimizer

from rankwise.comm import step_hooks
from rankwise.comm.step_hooks import Follower, Phase, closure_of, follow, with_closure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer


class Noted(Follower):
    """Notes its calls in a list."""

    def __init__(self, name: str, calls: list[str], only: list[Optimizer] | None = None) -> None:
        self.name, self.calls, self.only = name, calls, only

    def concerns(self, optimizer: Optimizer) -> bool:
        return self.only is None or any(optimizer is one for one in self.only)

    def before_step(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append(f"before {self.name}")
        closure = closure_of(args, kwargs)
        if closure is None:
            return None

        def call() -> Any:
            self.calls.append(f"closure of {self.name}")
            return closure()

        return with_closure(args, kwargs, call)

    def after_step(self, _optimizer: Optimizer) -> None:
        self.calls.append(f"after {self.name}")


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    gc.collect()
    step_hooks.put_around_backward(None)
    step_hooks.uninstall()
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks
    assert torch.autograd.backward.__module__ == "torch.autograd"


def sgd() -> torch.optim.SGD:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=0.1)


def test_followers_are_called_by_phase_and_then_as_they_came() -> None:
    calls: list[str] = []
    optimizer = sgd()
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("hook after"))
    given = [("model", Phase.MODEL), ("first", Phase.FIRST_STEP), ("other model", Phase.MODEL), ("watch", Phase.WATCH)]
    held = [Noted(name, calls) for name, _ in given]
    for one, (_, phase) in zip(held, given, strict=True):
        follow(one, phase)
    optimizer.step()
    order = ["watch", "first", "model", "other model"]
    hooks = ["hook before", "hook after"]
    assert calls == [f"before {one}" for one in order] + hooks + [f"after {one}" for one in order]


@pytest.mark.parametrize("by_name", [False, True])
def test_the_last_to_replace_a_closure_is_outermost(by_name: bool) -> None:
    calls: list[str] = []
    held = [Noted("first", calls), Noted("second", calls)]
    for one in held:
        follow(one, Phase.MODEL)
    closure: Callable[[], float] = lambda: 1.5  # noqa: E731 - LBFGS takes one
    step = sgd().step
    assert (step(closure=closure) if by_name else step(closure)) == 1.5
    assert calls[2:4] == ["closure of second", "closure of first"]


def test_a_follower_is_asked_again_if_groups_were_added() -> None:
    calls: list[str] = []
    optimizer, only = sgd(), list[Any]()
    one = Noted("one", calls, only)
    follow(one, Phase.MODEL)
    optimizer.step()
    only.append(optimizer)
    optimizer.step()
    assert calls == [], "asked once"
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    optimizer.step()
    assert calls == ["before one", "after one"]
    sgd().step()
    assert calls == ["before one", "after one"]


def test_a_follower_may_end_in_a_step_and_goes_when_it_is_deleted() -> None:
    calls: list[str] = []
    ends: list[Callable[[], None]] = []

    class EndsItself(Noted):
        def after_step(self, optimizer: Optimizer) -> None:
            super().after_step(optimizer)
            ends[0]()

    ending, staying = EndsItself("ending", calls), Noted("staying", calls)
    ends.append(follow(ending, Phase.WATCH))
    follow(staying, Phase.MODEL)
    optimizer = sgd()
    optimizer.step()
    optimizer.step()
    assert calls == [
        "before ending",
        "before staying",
        "after ending",
        "after staying",
        "before staying",
        "after staying",
    ]
    del staying
    gc.collect()
    calls.clear()
    optimizer.step()
    assert calls == []


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    calls: list[str] = []
    one = Noted("one", calls)
    follow(one, Phase.MODEL)
    optimizer = sgd()
    with suppress(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    calls.clear()
    optimizer.step()
    assert calls == ["before one", "after one"]


def test_hooks_stay_as_long_as_someone_follows() -> None:
    end = follow(Noted("kept", []), Phase.WATCH, is_kept=True)
    assert torch.autograd.backward.__module__ == "torch.autograd", "only steps are followed"
    step_hooks.install()
    assert torch.autograd.backward.__module__ == "rankwise.comm.step_hooks"
    gc.collect()
    step_hooks.uninstall()
    assert len(torch_optimizer._global_optimizer_post_hooks) == 1
    assert torch.autograd.backward.__module__ == "torch.autograd"
    end()
    step_hooks.uninstall()
    assert len(torch_optimizer._global_optimizer_post_hooks) == 0


def test_a_wrap_of_another_library_stays_and_calls_each_once() -> None:
    calls: list[str] = []

    def around(backward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        calls.append("around")
        backward(*args, **kwargs)

    assert step_hooks.put_around_backward(around)
    own = torch.autograd.backward

    def theirs(*args: Any, **kwargs: Any) -> None:
        calls.append("theirs")
        own(*args, **kwargs)

    torch.autograd.backward = theirs
    try:
        assert not step_hooks.put_around_backward(around)
        x = torch.ones(1, requires_grad=True)
        (2 * x).sum().backward()
        assert calls == ["theirs", "around"]
        step_hooks.put_around_backward(None)
        step_hooks.uninstall()
        (2 * x).sum().backward()
        assert calls == ["theirs", "around", "theirs"]
        assert x.grad is not None
        assert x.grad.item() == 4.0
    finally:
        torch.autograd.backward = own
