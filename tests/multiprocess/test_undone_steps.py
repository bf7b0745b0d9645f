# SPDX-License-Identifier: Apache-2.0
"""One copy per host: a step that fails or is interrupted is taken on every rank that survives, or on none."""

from __future__ import annotations

import copy
import importlib
import os
import signal
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from replicas import Net, batches, built, part
from torch import nn

import rankwise as rw
from rankwise.comm.backends.engine import Engine
from rankwise.errors import PeerFailed, PeerMissing, RankwiseError, ReplicasDiffer
from rankwise.testing import run_ranks
from rankwise.torch_private.step_guard import guard_steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from rankwise.world.facts import World

SIZES = (12, 7, 9, 12, 5)
FAILING = 3
"""The step that fails."""
KINDS: dict[str, dict[str, Any]] = {"SGD": {}, "AdamW": {"amsgrad": True}}
Result = dict[str, torch.Tensor]


def _values(model: nn.Module) -> Result:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _state(optimizer: torch.optim.Optimizer) -> Result:
    states = copy.deepcopy(optimizer.state_dict()["state"])
    return {f"{n}.{k}": one for n, state in states.items() for k, one in state.items() if isinstance(one, torch.Tensor)}


def _equal(one: Result, other: Result) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


# -- what happens in the step, on one rank -------------------------------------------------------------


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _in_update(then: Callable[..., None], kind: str, *, is_whole: bool) -> AbstractContextManager[Any]:
    """Have torch's update of what this rank owns be followed by ``then``, or one of its first parameter alone."""
    name = {"SGD": "sgd", "AdamW": "adam"}[kind]
    module = importlib.import_module(f"torch.optim.{name}")
    update = getattr(module, name)

    def replaced(parameters: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        if is_whole:
            update(parameters, *args, **kwargs)
        else:
            with torch.no_grad():
                parameters[0].view(-1)[: parameters[0].numel() // 2].add_(1)
        then()

    return mock.patch.object(module, name, replaced)


def _in_meeting(number: int, then: Callable[[Engine], None]) -> AbstractContextManager[Any]:
    """Call ``then`` in a meeting of the step, when this rank has arrived."""
    wait, calls = Engine.wait, []

    def replaced(self: Engine, operation: Any, ticket: Any) -> None:
        calls.append(None)
        if len(calls) == number:
            then(self)
        wait(self, operation, ticket)

    return mock.patch.object(Engine, "wait", replaced)


def _interrupt_when_all_are_here(engine: Engine) -> None:
    # It is empty once the meeting is over.
    while any(not one.awaited[0].reach(one.awaited[1]) for one in engine._active if one.awaited is not None):
        os.sched_yield()
    raise KeyboardInterrupt


def _event(stage: str, kind: str) -> AbstractContextManager[Any]:
    if stage == "before it":
        _die()
    return {
        "at the meeting before": lambda: _in_meeting(1, _die),
        "in the update": lambda: _in_update(_die, kind, is_whole=False),
        "after the update": lambda: _in_update(_die, kind, is_whole=True),
        "at the meeting after": lambda: _in_meeting(2, _die),
        "an error in the update": lambda: _in_update(_interrupt, kind, is_whole=False),
        "an error after the update": lambda: _in_update(_interrupt, kind, is_whole=True),
        "an interrupt at the meeting before": lambda: _in_meeting(1, _interrupt_when_all_are_here),
        "an interrupt at the meeting after": lambda: _in_meeting(2, _interrupt_when_all_are_here),
    }[stage]()


# -- stages --------------------------------------------------------------------------------------------

TAKEN = {"at the meeting after", "an interrupt at the meeting after"}
"""The stages at which the step counts: every rank has ended its part."""


def _steps(world: World, kind: str, stage: str, failing: int) -> dict[str, Any]:
    """Train until a step fails on rank 1; return what this rank then has."""
    model = rw.replicate(built(Net), one_copy_per_host=True)
    unshared = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = getattr(torch.optim, kind)([*model.parameters(), unshared], lr=0.05, **KINDS[kind])
    alias = model.first.weight.detach()
    held: dict[str, Any] = {}

    def values() -> Result:
        return _values(model) | {"unshared": unshared.detach().clone()}

    for step, batch in enumerate(batches(SIZES)):
        try:
            x, y = (part(one, world.rank, world.world_size) for one in batch)
            if step == 1:
                with torch.no_grad():
                    model.second.bias.mul_(0.5)
            nn.functional.mse_loss(model(x), y).backward()
            unshared.grad = torch.ones_like(unshared)
            if step == failing:
                with torch.no_grad():
                    model.last.bias.mul_(0.5)
                held |= {"before": values(), "state before": _state(optimizer)}
            with _event(stage, kind) if step == failing and world.rank == 1 and stage else nullcontext():
                optimizer.step()
            if step == failing:
                held["after"] = values()
        except (PeerFailed, PeerMissing, KeyboardInterrupt) as error:
            held["note"] = " ".join(getattr(error, "__notes__", []))
            break
        optimizer.zero_grad()
    held |= {"values": values(), "state": _state(optimizer)}
    held["alias"] = alias.equal(model.first.weight)
    held["refused"] = _refused(optimizer)
    return held


def _refused(optimizer: torch.optim.Optimizer) -> str:
    """Return the error of another step, by this rank alone."""
    # A rank that was interrupted in a step that counts has not run what follows a step.
    with suppress(ReplicasDiffer):
        rw.leave()
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.ones_like(one)
    try:
        optimizer.step()
    except RankwiseError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "stage",
    [
        "before it", "at the meeting before", "in the update", "after the update", "at the meeting after",
        "an error in the update", "an error after the update", "an interrupt at the meeting before",
        "an interrupt at the meeting after",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_fails_is_taken_on_every_rank_or_on_none(stage: str, kind: str) -> None:
    undisturbed = run_ranks(_steps, 3, kind, "", FAILING)[0].get()
    results = run_ranks(_steps, 3, kind, stage, FAILING)
    survivors = [results[rank].get() for rank in (range(3) if "an " in stage else (0, 2))]
    for one in survivors:
        assert _equal(one["before"], undisturbed["before"])
        assert _equal(one["values"], undisturbed["after"] if stage in TAKEN else one["before"])
        assert one["alias"]
        is_undone = stage not in TAKEN and stage != "before it"
        assert ("was undone: the parameters are those from before it" in one["note"]) == is_undone
        is_lost = is_undone and kind == "AdamW"
        assert ("The state of the optimizer is lost" in one["note"]) == is_lost
        assert ("its state is partly updated" in one["refused"]) == is_lost
        assert all(value.isnan().all() for value in one["state"].values()) if is_lost else True
        if stage == "before it":
            assert _equal(one["state"], one["state before"])


@pytest.mark.parametrize("stage", ["in the update", "an error in the update"])
def test_a_first_step_that_fails_leaves_no_state(stage: str) -> None:
    results = run_ranks(_steps, 2, "AdamW", stage, 0)
    for rank in (0, 1) if "an " in stage else (0,):
        one = results[rank].get()
        assert _equal(one["values"], one["before"])
        assert not one["state"]
        assert not one["refused"]


# -- ranks that leave a meeting which others reach later -----------------------------------------------


def _leaves_early(world: World, number: int, fifos: Path) -> dict[str, Any]:
    """Interrupt rank 0 in a meeting of a step, before the others arrive."""
    model = rw.replicate(built(Net), one_copy_per_host=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    fifo = fifos / str(world.rank)
    held: dict[str, Any] = {}

    def wait() -> None:
        assert fifo.read_text() == "left"

    for step, batch in enumerate(batches(SIZES)):
        x, y = (part(one, world.rank, world.world_size) for one in batch)
        nn.functional.mse_loss(model(x), y).backward()
        is_it = step == FAILING
        if is_it:
            held |= {"before": _values(model), "state before": _state(optimizer)}
        event: AbstractContextManager[Any] = nullcontext()
        if is_it and world.rank == 0:
            event = _in_meeting(number, _interrupt)
        elif is_it and number == 1:
            wait()
        elif is_it:
            event = _in_update(wait, "AdamW", is_whole=True)
        try:
            with event:
                optimizer.step()
        except (KeyboardInterrupt, PeerFailed, PeerMissing):
            held |= {"values": _values(model), "state": _state(optimizer)}
            if world.rank == 0:
                for other in range(1, world.world_size):
                    (fifos / str(other)).write_text("left")
            return held
        optimizer.zero_grad()
    return held


@pytest.mark.parametrize("number", [1, 2])
def test_a_meeting_that_a_rank_has_left_does_not_take_place_for_those_that_come_later(
    number: int, tmp_path: Path
) -> None:
    for rank in (1, 2):
        os.mkfifo(tmp_path / str(rank))
    for result in run_ranks(_leaves_early, 3, number, tmp_path):
        held = result.get()
        assert _equal(held["values"], held["before"])
        # No rank has begun a step whose first meeting did not take place.
        assert _equal(held["state"], held["state before"]) == (number == 1)


# -- after an error ------------------------------------------------------------------------------------


def _steps_again(world: World) -> None:
    """Fail in a step, load the state from before it, and step, alone."""
    model = rw.replicate(built(Net), one_copy_per_host=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step, (x, y) in enumerate(batches(SIZES[:3])):
        saved = copy.deepcopy(optimizer.state_dict())
        nn.functional.mse_loss(
            model(part(x, world.rank, world.world_size)), part(y, world.rank, world.world_size)
        ).backward()
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    values = _values(model)
    try:
        with _in_update(_interrupt, "AdamW", is_whole=False):
            optimizer.step()
    except KeyboardInterrupt:
        rw.leave()
    assert _equal(_values(model), values)
    assert "its state is partly updated" in _refused(optimizer)
    optimizer.load_state_dict(saved)
    alone = built(Net)
    alone.load_state_dict(values)
    reference = torch.optim.AdamW(alone.parameters(), lr=0.05)
    reference.load_state_dict(copy.deepcopy(saved))
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        other.grad = one.grad
    for one in (optimizer, reference):
        one.step()
    assert _equal(_values(model), _values(alone))
    assert _equal(_state(optimizer), _state(reference))


def test_an_optimizer_steps_again_once_its_state_is_loaded() -> None:
    for result in run_ranks(_steps_again, 2):
        result.get()


# -- the guard -----------------------------------------------------------------------------------------


def _raise() -> float:
    raise ValueError("of a closure")


def test_the_guard_leaves_torch_as_it_was() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    # It keeps the method that it finds.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step, failed = torch.optim.SGD.step, []
    end = guard_steps([torch.optim.SGD], lambda optimizer, error: failed.append((optimizer, str(error))))
    with pytest.raises(ValueError, match="of a closure"):
        optimizer.step(_raise)
    assert failed == [(optimizer, "of a closure")]
    optimizer.step()
    scheduler.step()
    end()
    with pytest.raises(ValueError, match="of a closure"):
        optimizer.step(_raise)
    assert len(failed) == 1
    assert torch.optim.SGD.step is step


def _kinds() -> tuple[Any, Any]:
    """Return a class and one derived from it, of which torch has made no optimizer."""

    class Base(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:
            return None if closure is None else closure()

    class Derived(Base):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    return Base, Derived


def test_the_guard_has_the_hooks_of_a_derived_class_run_once() -> None:
    base, derived = _kinds()
    plain, failed, steps = base.step, [], []
    end = guard_steps([base], lambda _, error: failed.append(str(error)))
    optimizer = derived([nn.Parameter(torch.ones(2))], {})
    hook = optimizer.register_step_post_hook(lambda *_: steps.append("derived"))
    optimizer.step()
    assert steps == ["derived"]
    hook.remove()
    with pytest.raises(ValueError, match="of a closure"):
        optimizer.step(_raise)
    assert failed == ["of a closure"]
    end()
    assert base.step is plain


def test_the_guard_ends_where_torch_has_put_its_hooks_around_it() -> None:
    base, _ = _kinds()
    failed: list[str] = []
    end = guard_steps([base], lambda _, error: failed.append(str(error)))
    optimizer = base([nn.Parameter(torch.ones(2))], {})
    with pytest.raises(ValueError, match="of a closure"):
        optimizer.step(_raise)
    end()
    with pytest.raises(ValueError, match="of a closure"):
        optimizer.step(_raise)
    assert failed == ["of a closure"]
