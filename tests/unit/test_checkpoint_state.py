# SPDX-License-Identifier: Apache-2.0
"""State trees: everything that may be saved comes back the same, everything else is named."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from rankwise.checkpoint import state
from rankwise.errors import CheckpointError


def _there_and_back(tree: object) -> Any:
    skeletons, tensors = state.flatten({"x": tree})
    text = json.dumps(skeletons["x"], allow_nan=False)
    return state.unflatten(json.loads(text), tensors.__getitem__)


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and all(type(k) is type(q) for k, q in zip(a, b, strict=True))
            and all(_same(a[key], b[key]) for key in a)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if type(a) is complex:
        return _same(a.real, b.real) and _same(a.imag, b.imag)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


LEAVES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**63,
    -(2**200),
    10**5000,
    0.0,
    -0.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    math.nan,
    1 + 2j,
    complex(math.nan, -math.inf),
    "",
    "tensor",
    "é\ud800\0",
    1 / 3,
    np.float32(0.1),
    np.float64(math.nan),
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 - 2j),
    np.float16(0.1),
    np.arange(6).reshape(2, 3),
    np.zeros((0, 4), np.float32),
    np.array(3.5),
    torch.tensor(3),
    torch.tensor(True),
    torch.empty(0, 2),
    torch.ones(2, 3).t(),
    torch.ones(2, dtype=torch.bfloat16),
    (),
    [],
    {},
    OrderedDict(),
    Counter("abca"),
    torch.Size([2, 0]),
    (1,),
    [None],
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: type(leaf).__name__)
def test_every_kind_of_leaf_comes_back(leaf: object) -> None:
    assert _same(_there_and_back(leaf), leaf)


def _random_tree(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(LEAVES)
    items = [_random_tree(rng, depth - 1) for _ in range(rng.randrange(4))]
    keys = rng.sample(["a", "b.c", "tensor", "dict", "", 0, -5, 1.5, None, "é"], len(items))
    return rng.choice(
        [
            list,
            tuple,
            lambda _: dict(zip(keys, items, strict=True)),
            lambda _: OrderedDict(zip(keys, items, strict=True)),
        ]
    )(items)


@pytest.mark.parametrize("seed", range(200))
def test_random_trees_come_back(seed: int) -> None:
    tree = _random_tree(random.Random(seed), 4)
    assert _same(_there_and_back(tree), tree)


def test_true_and_one_stay_apart_as_keys() -> None:
    assert list(map(type, _there_and_back({True: 1, 2: 2, "2": 3}))) == [bool, int, str]


def test_tensors_are_named_by_their_path_and_never_twice() -> None:
    _, tensors = state.flatten({"m": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, 3: [torch.ones(2)]}})
    assert list(tensors) == ["m.a.b", "m.a.b'", "m[3][0]"]


def test_tied_tensors_are_kept_once_and_tied_again() -> None:
    weight = torch.randn(3, 2)
    skeletons, tensors = state.flatten({"x": {"a": weight, "b": weight, "t": weight.t(), "part": weight[:1]}})
    assert set(tensors) == {"x.a", "x.t", "x.part"}
    back = state.unflatten(skeletons["x"], tensors.__getitem__)
    assert back["a"] is back["b"]


def test_empty_tensors_are_not_mistaken_for_tied_ones() -> None:
    back = _there_and_back([torch.empty(0, 2), torch.empty(0, 3), torch.empty(0, 2)])
    assert [list(tensor.shape) for tensor in back] == [[0, 2], [0, 3], [0, 2]]


def test_the_versions_a_module_keeps_beside_its_state_come_back() -> None:
    saved = torch.nn.BatchNorm1d(2).state_dict()
    back = _there_and_back(saved)
    assert type(back) is OrderedDict
    assert back._metadata == saved._metadata  # type: ignore[attr-defined]


class _Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


_Pair = namedtuple("_Pair", "a b")  # noqa: PYI024 - an untyped one


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        b"x",
        object(),
        len,
        defaultdict(int),
        _Pair(1, 2),
        torch.float32,
        np.array(["a"]),
        np.array([None]),
        np.datetime64("2020-01-01"),
        np.arange(3, dtype=">i4"),
        torch.eye(2).to_sparse(),
        {(1, 2): 3},
        np.str_("a"),
        torch.Tensor._make_subclass(_Wrapper, torch.ones(2)),
        range(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_named_by_path_and_type(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"x\.list\[1\]\.key") as caught:
        state.flatten({"x": {"list": [0, {"key": value}]}})
    kind = tuple if isinstance(value, dict) and not isinstance(value, defaultdict) else type(value)
    assert kind.__qualname__ in str(caught.value)


def test_a_tree_within_itself_is_an_error() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        state.flatten({"x": tree})


@pytest.mark.parametrize("skeleton", [{"pickle": "x"}, {}, {"float": "1.0"}, {"numpy": "object", "value": 1}])
def test_an_unknown_skeleton_is_an_error(skeleton: Any) -> None:
    with pytest.raises(CheckpointError, match="unknown kind"):
        state.unflatten(skeleton, {}.__getitem__)


def test_leaves_tell_where_two_states_differ() -> None:
    skeletons, _ = state.flatten({"x": {"a": [1, {2: math.nan}], "t": torch.ones(2), "e": {}}})
    found = state.leaves(skeletons["x"], "x", {"x.t": "float32[2]"})
    assert found == {
        "x.a[0]": "1",
        "x.a[1][2]": '{"float": "nan"}',
        "x.t": "float32[2]",
        "x.e": "empty dict",
    }
