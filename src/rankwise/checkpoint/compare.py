# SPDX-License-Identifier: Apache-2.0
"""Check whether saved state fits an object, before anything is changed.

Reads objects and state trees, changes neither; no files, no other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from rankwise.checkpoint.content import kind_of, unwrapped
from rankwise.checkpoint.files import dtype_name
from rankwise.checkpoint.state import child
from rankwise.torch_private.modules import EXTRA_STATE

_ABSENT = "nothing"


class StateDifference(NamedTuple):
    """The first place where saved state does not fit an object, and the texts of both."""

    path: str
    """The key, as ``model.fc.weight``."""
    saved: str
    here: str


def first_difference(name: str, item: object, saved: object, saved_kind: str) -> StateDifference | None:
    """Return the first place where ``saved`` does not fit ``item``, or ``None``.

    A module must have the same keys, and tensors of the same shape and dtype. An optimizer must be
    of the same class, with as many parameters in each group; the parameters of a torch optimizer must have the
    shapes of its saved state. A scheduler must be of the same class. For any other object only the
    tensors that both sides have are compared: rankwise does not know the meaning of other keys.
    """
    inner = unwrapped(item)
    if isinstance(inner, torch.nn.Module):
        return _compare(name, saved, inner.state_dict(), strict=True)
    of_one_class = isinstance(inner, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler)
    if of_one_class and saved_kind.rpartition(".")[2] != type(inner).__name__:
        return StateDifference(f"the class of {name}", saved_kind, kind_of(inner))
    if isinstance(inner, torch.optim.Optimizer):
        return (
            _compare_groups(name, saved, inner)
            or _compare_shapes(name, saved, inner)
            or _compare(name, saved, inner.state_dict(), strict=False)
        )
    if callable(getattr(inner, "state_dict", None)):
        return _compare(name, saved, cast("Any", inner).state_dict(), strict=False)
    if isinstance(inner, torch.Tensor):
        return _compare(name, saved, inner, strict=True)
    kinds = _text(saved), _text(item)
    if any(isinstance(inner, kind) and not isinstance(saved, kind) for kind in (dict, list)):
        return StateDifference(name, *kinds)
    return None


def _compare(path: str, saved: object, here: object, *, strict: bool) -> StateDifference | None:
    if isinstance(saved, torch.Tensor) and isinstance(here, torch.Tensor):
        lazy = torch.nn.parameter.is_lazy(here)
        return None if lazy or _text(saved) == _text(here) else StateDifference(path, _text(saved), _text(here))
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        entries = cast("Mapping[Any, object]", saved), cast("Mapping[Any, object]", here)
        return _compare_entries(path, *entries, strict=strict)
    if isinstance(saved, list | tuple) and isinstance(here, list | tuple):
        pairs = zip(cast("Sequence[object]", saved), cast("Sequence[object]", here), strict=False)
        for index, (theirs, ours) in enumerate(pairs):
            if difference := _compare(f"{path}[{index}]", theirs, ours, strict=strict):
                return difference
    elif strict and isinstance(saved, torch.Tensor) != isinstance(here, torch.Tensor):
        return StateDifference(path, _text(cast("Any", saved)), _text(cast("Any", here)))
    return None


def _compare_entries(
    path: str, saved: Mapping[Any, object], here: Mapping[Any, object], *, strict: bool
) -> StateDifference | None:
    for key in [*here, *(key for key in saved if key not in here)]:
        place = child(path, key)
        if key in saved and key in here:
            # A module's extra state is a value of its own, of any form.
            inner = strict and not str(key).endswith(EXTRA_STATE)
            if difference := _compare(place, saved[key], here[key], strict=inner):
                return difference
        elif strict:
            theirs = _text(saved[key]) if key in saved else _ABSENT
            return StateDifference(place, theirs, _text(here[key]) if key in here else _ABSENT)
    return None


def _compare_groups(name: str, saved: object, optimizer: torch.optim.Optimizer) -> StateDifference | None:
    tree = cast("dict[str, Any]", saved) if isinstance(saved, dict) else {}
    groups: list[dict[str, Any]] = tree.get("param_groups", [])
    path = f"{name}.param_groups"
    if not (isinstance(cast("object", groups), list) and all(map(_is_group, groups))):
        return StateDifference(path, "something else", "groups of parameters")
    if len(groups) != len(optimizer.param_groups):
        return StateDifference(path, f"{len(groups)} groups", f"{len(optimizer.param_groups)} groups")
    for index, (theirs, ours) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        counts = len(theirs["params"]), len(ours["params"])
        if counts[0] != counts[1]:
            return StateDifference(f"{path}[{index}].params", *(f"{count} parameters" for count in counts))
    return None


def _is_group(group: object) -> bool:
    numbers: object = cast("dict[str, Any]", group).get("params") if isinstance(group, dict) else None
    return isinstance(numbers, list) and all(isinstance(one, int) for one in cast("list[object]", numbers))


def _compare_shapes(name: str, saved: object, optimizer: torch.optim.Optimizer) -> StateDifference | None:
    """Compare state with the parameters that it belongs to: a fresh optimizer has no state to compare it with."""
    # Other optimizers may keep matrices of other shapes, as LBFGS keeps all parameters in one vector.
    if not type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.LBFGS):
        return None
    tree = cast("dict[str, Any]", saved)
    entries: dict[int, dict[str, Any]] = tree.get("state", {})
    if not (isinstance(cast("object", entries), dict) and all(isinstance(one, dict) for one in entries.values())):
        return StateDifference(f"{name}.state", "something else", "entries of parameters")
    numbers = [number for group in tree["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if torch.nn.parameter.is_lazy(parameter):
            continue
        for key, value in entries.get(number, {}).items():
            if not isinstance(value, torch.Tensor) or value.ndim != parameter.ndim:
                continue
            # Adafactor keeps the means of rows and of columns.
            if any(size not in (1, here) for size, here in zip(value.shape, parameter.shape, strict=True)):
                return StateDifference(f"{name}.state[{number}].{key}", _text(value), f"a parameter {_text(parameter)}")
    return None


def _text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    return type(value).__name__
