# SPDX-License-Identifier: Apache-2.0
"""Arguments that are refused before anything starts, and values passed between a caller and its ranks."""

from __future__ import annotations

import functools
import inspect
import io
import threading
from typing import Any
from unittest import mock

import pytest

import rankwise as rw
from rankwise.errors import ConfigurationError
from rankwise.launch.function import call


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "ranks must be an int >= 1, got 0"),
        ({"ranks": 2.0}, "ranks must be an int >= 1, got 2.0"),
        ({"ranks": True}, "ranks must be an int >= 1, got True"),
        ({"max_restarts": -1}, "max_restarts must be an int >= 0, got -1"),
        ({"device": "gpu"}, 'device="auto"'),
        ({"num_nodes": 0}, "num_nodes must be an int >= 1, got 0"),
        ({"num_nodes": 2}, 'rendezvous="host:port"'),
        ({"num_nodes": 2, "rendezvous": "gpu-01"}, "host:port"),
        ({"num_nodes": 2, "rendezvous": "gpu-01:29500", "node_rank": 2}, "from 0 to 1"),
    ],
)
def test_bad_options_are_refused_by_both(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        rw.launch(print, **options)
    with pytest.raises(ConfigurationError, match=words):
        rw.launcher(**options)


@pytest.mark.parametrize("call", [rw.launch, rw.launcher])
def test_both_start_one_rank_per_device_of_this_machine_and_restart_none_unless_told(call: Any) -> None:
    defaults = {
        name: one.default for name, one in inspect.signature(call).parameters.items() if one.kind.name == "KEYWORD_ONLY"
    }
    assert defaults.pop("device") == "auto"
    assert (defaults.pop("num_nodes"), defaults.pop("max_restarts")) == (1, 0)
    assert (defaults.pop("on"), defaults.pop("cpus_per_rank")) == ("here", 1)
    assert set(defaults.values()) == {None}


def test_only_a_function_can_be_launched() -> None:
    with pytest.raises(ConfigurationError, match="3 is not a function"):
        rw.launch(3, ranks=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="3 is not a function"):
        rw.launcher(3)  # type: ignore[call-overload]


def test_objects_that_cannot_be_pickled_are_named() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigurationError, match=r"argument 2 \(a lock\) cannot be pickled"):
        rw.launch(print, 1, lock)
    with pytest.raises(ConfigurationError, match=r"argument 'file' \(a lock\) cannot be pickled"):
        rw.launcher(print)(file=lock)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the variable 'lock', which the function uses"):
        rw.launch(functools.partial(lambda x: (x, lock), 1))


class Plain(Exception):
    pass


class Odd(Exception):
    """Its arguments differ from those it passes on: unpickling calls ``__init__`` with one too few."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


class Twice(Exception):
    """Words its message each time it is made."""

    def __init__(self, why: str) -> None:
        super().__init__(f"because {why}")


@pytest.mark.parametrize(
    "error", [Plain("a", 1), Odd(3, "no"), Twice("of it"), KeyError("k"), OSError(2, "no such", "file"), SystemExit(3)]
)
def test_an_exception_comes_back_the_same(error: BaseException) -> None:
    told = call.raised(error, "text")
    assert told.pickled is not None
    same = call.exception(told.pickled)
    assert type(same) is type(error)
    assert (str(same), same.args, vars(same)) == (str(error), error.args, vars(error))


def test_an_exception_that_cannot_be_pickled_keeps_its_text() -> None:
    error = Plain("holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    told = call.raised(error, "text")
    assert (told.pickled, told.type, told.message) == (None, "Plain", "holds a lock")


def test_a_class_that_is_here_already_stays_as_it_is() -> None:
    class Local:
        def method(self) -> int:
            return 1

    before = Local.method
    file = io.BytesIO()
    call.dump(Local(), file)
    file.seek(0)
    assert type(call.load(file)) is Local
    assert Local.method is before


class _Trained:
    def train(self) -> object:
        return rw.shard


def _joins() -> object:
    return rw.join, _Trained


def test_the_names_that_a_function_uses_include_those_of_its_own_module() -> None:
    @functools.wraps(_joins)
    def decorated() -> None:
        return None

    for fn in (_joins, decorated, functools.partial(_joins), _Trained().train):
        assert {"rankwise", "shard"} <= call.names_used(fn)
    assert "join" in call.names_used(_joins)
    assert "join" not in call.names_used(_Trained().train)
    assert call.names_used(print) == frozenset()
    assert "rankwise.errors" in call.names_used(test_only_a_function_can_be_launched)


_without_module: dict[str, Any] = {}
exec("def made():\n    return rw.shard", _without_module)  # noqa: S102 - as libraries make functions
_made = _without_module["made"]


class _Mocked:
    calls = mock.call


def _uses_both() -> object:
    return _made(), _Mocked


def test_names_are_found_where_a_function_has_no_module_or_an_attribute_answers_to_any_name() -> None:
    assert {"_made", "_Mocked"} <= call.names_used(_uses_both)
    assert all(isinstance(name, str) for name in call.names_used(_uses_both))
