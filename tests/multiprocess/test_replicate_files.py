# SPDX-License-Identifier: Apache-2.0
"""``torch.save`` of a replicated model writes what it would write of the plain one."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from rankwise.world.facts import World

OPTIONS = {
    "plain": {},
    "sync_batchnorm": {"sync_batchnorm": True},
    "weight": {"weight": len},
    "compress": {"compress": "powersgd"},
}
CLASSES = [nn.Sequential, nn.Linear, nn.BatchNorm1d, nn.ReLU]


class _OwnState(nn.Sequential):
    """A model that says itself what is kept of it."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "kept": 1}


def _model(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    model = kind(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    model.register_forward_hook(_users_hook, with_kwargs=True)
    return model


def _users_hook(*_: object) -> None: ...


def _classes_in(file: io.BytesIO) -> set[str]:
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        found = pickletools.genops(archive.read(name))
        return {str(argument) for code, argument, _ in found if code.name == "GLOBAL"}


def _saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    return file


def _train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _save(world: World, how: str) -> None:
    model = rw.replicate(_model(), **OPTIONS[how])
    _train(model)
    file = _saved(model)
    assert _classes_in(file) == _classes_in(_saved(_model()))
    file.seek(0)
    with torch.serialization.safe_globals([*CLASSES, _users_hook]):
        loaded = torch.load(file, weights_only=True)
    for twin in (loaded, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):  # noqa: S301
        assert [type(layer) for layer in twin.modules()] == [type(layer) for layer in _model().modules()]
        assert all(torch.equal(twin.state_dict()[key], value) for key, value in model.state_dict().items())
        assert list(twin._forward_hooks.values()) == [_users_hook]
        assert len(twin._forward_hooks_with_kwargs) == 1
        assert not twin._forward_pre_hooks
        assert vars(twin).keys() == vars(_model()).keys()
        if world.rank == 0:
            _train(twin)
    _train(model)  # which the copies have not changed


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_saved_model_is_a_plain_one(how: str, world_size: int) -> None:
    for result in testing.run_ranks(_save, world_size, how):
        result.get()


def _save_own_state(_: World) -> None:
    model = rw.replicate(_model(_OwnState))
    loaded = pickle.loads(pickle.dumps(model))  # noqa: S301
    assert loaded.kept == 1
    assert list(loaded._forward_hooks.values()) == [_users_hook]
    assert "__getstate__" not in vars(loaded)


def test_a_model_with_a_state_of_its_own_keeps_it() -> None:
    (result,) = testing.run_ranks(_save_own_state, 1)
    result.get()


class _OwnReduce(nn.Sequential):
    """A model that says itself how it is pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuilt, (dict(vars(self)),))


def _rebuilt(state: dict[str, Any]) -> nn.Module:
    model = _OwnReduce()
    vars(model).update(state)
    return model


def _save_what_reduces_itself(_: World, how: str) -> None:
    model = _model(_OwnReduce)
    if how == "placed":
        model = rw.place(_model(), {"": "cpu"})
    rw.replicate(model)
    _train(model)
    file = _saved(model)
    for written in (file, _saved(copy.deepcopy(model))):
        assert [name for name in _classes_in(written) if "rankwise" in name] == []
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in model.state_dict().items())
    x = torch.ones(2, 3)
    loaded.eval()
    assert torch.equal(loaded(x), model.eval()(x))


@pytest.mark.parametrize("how", ["reduces itself", "placed"])
def test_a_model_that_is_pickled_its_own_way_leaves_no_class_of_ours(how: str) -> None:
    (result,) = testing.run_ranks(_save_what_reduces_itself, 1, how)
    result.get()
